"""The HTTP face of one worker: OpenAI's interface over a Unix socket or TCP, `/state`, `/metrics`, `/health`.

`main` is the worker's process: it loads what its config names, serves, and beats into the registry.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TextIO, cast

import msgspec
import structlog
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from workers import protocol
from workers.client import Registry
from workers.config import Fleet, WorkerConfig
from workers.counterfactual import Scored, otherwise
from workers.engine import Engine
from workers.errors import BadPrompt, LoadFailed, WorkerError
from workers.holdings import Holdings
from workers.jobs import Done, Event, Failed, Finished, Job, Request, Started, Text
from workers.logs import LossyStream
from workers.openai_wire import DONE, Answer, Body, error_body, error_event, read_body, read_counterfactual, usage_of
from workers.prompt import Prompt
from workers.protocol import WorkerState
from workers.runtime import Keep, Runtime
from workers.sampling import Chosen, Sampling

log = structlog.get_logger("worker")


class Worker:
    """One engine and what it holds, behind HTTP."""

    def __init__(self, config: WorkerConfig, holdings: Holdings, engine: Engine, url: str) -> None:
        self.config, self.holdings, self.engine, self.url = config, holdings, engine, url
        self.epoch = secrets.token_hex(8)

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/counterfactual", self.counterfactual, methods=["POST"]),
                Route("/state", self.show_state),
                Route("/metrics", self.metrics),
                Route("/health", self.health),
                Route("/kv", self.kv),
                Route("/kv/{tenant}", self.purge, methods=["DELETE"]),
            ]
        )

    def state(self) -> WorkerState:
        """The heartbeat."""
        running, queued = self.engine.load()
        return WorkerState(
            name=self.config.name,
            epoch=self.epoch,
            url=self.url,
            pid=os.getpid(),
            models=self.holdings.models,
            pairs=self.holdings.pairs,
            rates=self.engine.rates.rates(),
            running=running,
            queued=queued,
            max_running=self.engine.max_running,
            max_queued=self.engine.max_queued,
            free_bytes=self.holdings.free_bytes(),
            at=time.time(),
            stalled_s=self.engine.stalled(),
            loading=self.holdings.loading,
            kv=self.holdings.counted(),
        )

    async def show_state(self, request: HttpRequest) -> Response:
        return Response(msgspec.json.encode(self.state()), media_type="application/json")

    async def health(self, request: HttpRequest) -> Response:
        ok = self.engine.alive and self.engine.failed is None
        return Response(b'{"status":"ok"}' if ok else b'{"status":"failed"}', 200 if ok else 503)

    async def models(self, request: HttpRequest) -> Response:
        names = [*(m.name for m in self.holdings.models if m.ready), *(p.name for p in self.holdings.pairs if p.ready)]
        data = [{"id": n, "object": "model", "created": 0, "owned_by": "twolane"} for n in names]
        return Response(msgspec.json.encode({"object": "list", "data": data}), media_type="application/json")

    async def metrics(self, request: HttpRequest) -> Response:
        return Response(self.holdings.metrics(self.state()), media_type="text/plain; version=0.0.4")

    async def kv(self, request: HttpRequest) -> Response:
        return Response(msgspec.json.encode(await asyncio.to_thread(self.holdings.kv)), media_type="application/json")

    async def purge(self, request: HttpRequest) -> Response:
        try:
            gone = await asyncio.to_thread(self.holdings.store.purge, request.path_params["tenant"])
        except OSError as error:  # the disk does not even take the new epoch: what is stored stands
            told = WorkerError(f"the store's disk refused: {error.strerror}")
            return Response(error_body(told), told.status, media_type="application/json")
        return Response(
            msgspec.json.encode({"entries": gone.entries, "bytes": gone.bytes}), media_type="application/json"
        )

    async def chat(self, request: HttpRequest) -> Response:
        return await self._answer(request, chat=True)

    async def complete(self, request: HttpRequest) -> Response:
        return await self._answer(request, chat=False)

    async def _answer(self, request: HttpRequest, *, chat: bool) -> Response:
        try:
            body = read_body(await request.body(), chat=chat)
            runtime = self.holdings.runtime(body.model)
            # Tokenizing a long prompt takes a while: not on the loop.
            prompt = await asyncio.to_thread(self._prompt, runtime, body)
            return await self._run(request, body, runtime, prompt)
        except WorkerError as error:
            headers = {"retry-after": "1"} if error.status == 503 else None
            return Response(error_body(error), error.status, headers, "application/json")

    async def counterfactual(self, request: HttpRequest) -> Response:
        """`protocol.Counterfactual`; nothing of it is kept, so no header of a tenant is read."""
        try:
            ask = read_counterfactual(await request.body())
            body = read_body(ask.request, chat=ask.chat)
            held = self.holdings.runtime(body.model)
            runtime = await asyncio.to_thread(otherwise, held, ask.kind, ask.other)
            prompt = await asyncio.to_thread(self._prompt, runtime, body)
            scored = None if ask.score is None else Scored.of(runtime, ask.score)
            return await self._run(request, msgspec.structs.replace(body, stream=False), runtime, prompt, ask, scored)
        except WorkerError as error:
            return Response(error_body(error), error.status, media_type="application/json")

    def _prompt(self, runtime: Runtime, body: Body) -> Prompt:
        if body.messages is not None:
            return runtime.chat(body.messages)
        prompts = body.prompt if isinstance(body.prompt, list) else [body.prompt or ""]
        if len(prompts) != 1:
            raise BadPrompt(f"one prompt per request is served here, and there were {len(prompts)}")
        return runtime.text(prompts[0])

    async def _run(
        self,
        http: HttpRequest,
        body: Body,
        runtime: Runtime,
        prompt: Prompt,
        aside: protocol.Counterfactual | None = None,
        scored: Scored | None = None,
    ) -> Response:
        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        deadline = http.headers.get(protocol.DEADLINE_MS)
        request = Request(
            model=body.model,
            prompt=prompt,
            sampling=_ONE if scored is not None else sampling_of(body),
            emit=lambda event: loop.call_soon_threadsafe(events.put_nowait, event),  # type: ignore[arg-type]
            keep=self._keep(http) if aside is None else None,
            account=http.headers.get(protocol.ACCOUNT, ""),
            weight=_weight(http.headers.get(protocol.WEIGHT, "1")),
            deadline=None if deadline is None else time.monotonic() + _number(deadline, protocol.DEADLINE_MS) / 1e3,
            tell_tokens=aside is not None or http.headers.get(protocol.RECORD) == "1",
            runtime=None if aside is None else runtime,
            steps=None if scored is None else scored.prefill,
            background=aside is not None and aside.background,
        )
        job = self.engine.submit(request)
        started = await _or_hang_up(http, job, events)
        if started is None:
            return Response(status_code=499)
        headers = {protocol.KV: f"{started.reused}/{started.prompt_tokens}"}
        answer = Answer(body.model, runtime.fingerprint, chat=body.messages is not None)
        text = Texts(runtime.decoder.tokenizer)
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            frames = stream(job, events, answer, text, started, usage=usage)
            return _Stream(job, frames, headers)
        whole = await whole_answer(http, job, events, answer, text, started)
        return Response(whole, 200 if whole else 499, headers, "application/json")

    def _keep(self, http: HttpRequest) -> Keep | None:
        tenant, store = http.headers.get(protocol.TENANT), self.holdings.store
        if tenant is None:
            return None
        encrypt = http.headers.get(protocol.KV_ENCRYPT) == "1"
        return Keep(
            store.scope(tenant, encrypt=encrypt),
            ttl=_number(http.headers.get(protocol.KV_TTL, "86400"), protocol.KV_TTL),
            max_bytes=int(_number(http.headers.get(protocol.KV_MAX_BYTES, str(1 << 32)), protocol.KV_MAX_BYTES)),
        )


_ONE = Sampling(temperature=0.0, max_tokens=1)
"""Of a request that is read and not answered: an answer has one token at least."""


class _Stream(StreamingResponse):
    """Cancels its job however it ends, also when the caller left before the first frame was asked for."""

    def __init__(self, job: Job, frames: AsyncIterator[bytes], headers: dict[str, str]) -> None:
        super().__init__(frames, headers=headers, media_type="text/event-stream")
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


def _number(text: str, header: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise BadPrompt(f"header {header} must be a number, and was {text!r}")
    return number


def _weight(text: str) -> float:
    weight = _number(text, protocol.WEIGHT)
    if weight <= 0:
        raise BadPrompt(f"header {protocol.WEIGHT} must be above 0, and was {text!r}")
    return weight


async def _or_hang_up(http: HttpRequest, job: Job, events: asyncio.Queue[Event]) -> Started | None:
    """The first event, or None when the caller left before it. Raises what the engine failed with."""
    event = await _next(http, job, events)
    match event:
        case None:
            return None
        case Started():
            return event
        case Failed(error=error):
            raise error
        case _:
            raise AssertionError(f"an answer begins with Started, not {type(event).__name__}")


async def _next(http: HttpRequest, job: Job, events: asyncio.Queue[Event]) -> Event | None:
    """The next event; None, with the job cancelled, when the caller hangs up while it is waited for."""
    if not events.empty():
        return events.get_nowait()
    get = asyncio.ensure_future(events.get())
    gone = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({get, gone}, return_when=asyncio.FIRST_COMPLETED)
        if get.done():
            return get.result()
        job.cancel()
        return None
    except asyncio.CancelledError:  # the worker ends: nobody takes what is still to come
        job.cancel()
        raise
    finally:
        get.cancel()
        gone.cancel()


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


class Texts:
    """Log probabilities in OpenAI's shape."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def logprobs(self, tokens: tuple[Chosen, ...]) -> dict[str, Any] | None:
        """None where none were asked for."""
        if not tokens:
            return None
        return {"content": [self._entry(c.token, c.logprob, c.top) for c in tokens], "refusal": None}

    def _entry(self, token: int, logprob: float | None, top: tuple[tuple[int, float], ...] | None) -> dict[str, Any]:
        text = self._tokenizer.decode([token])
        entry = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        if top is not None:
            entry["top_logprobs"] = [self._entry(t, p, None) for t, p in top]
        return entry


async def stream(
    job: Job, events: asyncio.Queue[Event], answer: Answer, texts: Texts, started: Started, *, usage: bool
) -> AsyncIterator[bytes]:
    """SSE frames of one job."""
    if answer.chat:
        for index in range(job.request.sampling.n):
            yield answer.opening(index)
    while True:
        event = await events.get()
        match event:
            case Text(index=index, text=text, tokens=tokens):
                yield answer.delta(index, text, texts.logprobs(tokens))
            case Finished(index=index, reason=reason):
                yield answer.finish(index, reason)
            case Done(prompt_tokens=prompt, completion_tokens=completion, run=run):
                if usage:
                    yield answer.usage(usage_of(prompt, completion, started.reused), run)
                yield DONE
                return
            case Failed(error=error):
                yield error_event(error)
                return
            case Started():
                raise AssertionError("an answer starts once")


async def whole_answer(
    http: HttpRequest, job: Job, events: asyncio.Queue[Event], answer: Answer, texts: Texts, started: Started
) -> bytes:
    """The body of a plain answer; empty when the caller hung up. Raises what the engine failed with."""
    parts: list[list[str]] = [[] for _ in range(job.request.sampling.n)]
    tokens: list[list[Chosen]] = [[] for _ in parts]
    reasons = ["length"] * len(parts)
    while True:
        event = await _next(http, job, events)
        match event:
            case None:
                return b""
            case Text(index=index, text=text, tokens=new):
                parts[index].append(text)
                tokens[index].extend(new)
            case Finished(index=index, reason=reason):
                reasons[index] = reason
            case Failed(error=error):
                raise error
            case Done(prompt_tokens=prompt, completion_tokens=completion, run=run):
                choices = [
                    _choice(answer, i, "".join(parts[i]), texts.logprobs(tuple(tokens[i])), reasons[i])
                    for i in range(len(parts))
                ]
                return answer.whole(choices, usage_of(prompt, completion, started.reused), run)
            case Started():
                raise AssertionError("an answer starts once")


def _choice(answer: Answer, index: int, text: str, logprobs: dict[str, Any] | None, reason: str) -> dict[str, Any]:
    content: dict[str, Any] = (
        {"message": {"role": "assistant", "content": text, "refusal": None}} if answer.chat else {"text": text}
    )
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}


def sampling_of(body: Body) -> Sampling:
    """Raises BadPrompt for values out of range."""
    given = {
        name: value
        for name in ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
                     "repetition_penalty", "n")
        if (value := getattr(body, name)) is not None
    }  # fmt: skip
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    try:
        bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    except ValueError as error:
        raise BadPrompt(f"logit_bias must have token ids as keys ({error})") from error
    asked = None
    if body.logprobs is True:
        asked = body.top_logprobs or 0
    elif body.top_logprobs is not None:
        raise BadPrompt("top_logprobs needs logprobs: true")
    if given.get("temperature") != 0.0:
        # Drawn here and told in the answer's Run, so that any answer can be repeated. JSON keeps 53 bits everywhere.
        given.setdefault("seed", secrets.randbits(53))
    return Sampling(
        **given,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        stop=tuple(s for s in stop if s),
        logit_bias=bias,
        logprobs=asked,
        ignore_eos=body.ignore_eos,
    )


def numerics(config: WorkerConfig, device: torch.device, codec: str) -> str:
    """What decides the low bits of every answer here, beside weights and dtype, which the fingerprint covers."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    parts = (
        f"torch {torch.__version__}",
        f"{device.type} {where}",
        f"threads {config.threads or torch.get_num_threads()}",
        f"chunk {config.prefill_chunk}",
        "packed" if config.pack else "unpacked",
        f"kv {codec}",
    )
    return ", ".join(parts)


async def beat(worker: Worker, registry: Registry | None, every: float) -> None:
    """Write the heartbeat for ever, where there is a registry; end the process when the engine has failed."""
    while True:
        if worker.engine.failed is not None or not worker.engine.alive:
            log.error("engine is gone; ending", worker=worker.config.name)
            os._exit(1)
        if registry is not None:
            await registry.publish(worker.state())
        await asyncio.sleep(every)


async def serve(worker: Worker, registry: Registry | None, *, every: float = 1.0) -> None:
    """Serve until SIGTERM; what runs then has a few seconds to end."""
    kind, _, place = worker.url.partition(":")
    if kind == "unix":
        Path(place).unlink(missing_ok=True)  # noqa: ASYNC240 - once, before anything is served
        where: dict[str, Any] = {"uds": place}
    else:
        host, _, port = worker.url.removeprefix("http://").rpartition(":")
        where = {"host": host, "port": int(port)}
    server = uvicorn.Server(
        uvicorn.Config(
            worker.app(),
            **where,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            timeout_graceful_shutdown=5,
        )
    )
    heart = asyncio.create_task(beat(worker, registry, every))
    # uvicorn restores these and raises the signal that ended it once more: by default that would end the process
    # here, with the heartbeat still standing and the store not flushed.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    try:
        await server.serve()
    finally:
        heart.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await heart
        # While the loop still takes what it emits.
        await asyncio.to_thread(worker.engine.close)
        if registry is not None:
            await registry.withdraw(worker.state())
            await registry.close()


def main(fleet: Fleet, name: str, *, url: str, private: bool = False) -> int:
    """The worker's process. A private one stands in no registry and stores nothing."""
    if private:
        store = fleet.store.model_copy(update={"dir": None, "shared": None, "ram_bytes": 0})
        fleet = fleet.model_copy(update={"store": store})
    config = next(w for w in fleet.workers if w.name == name)
    _die_with_parent()
    _quiet_logs()
    try:
        holdings = Holdings(fleet, config)
    except LoadFailed as error:
        log.critical("worker not started", worker=name, reason=str(error))
        return 1
    engine = Engine(
        holdings.runtimes,
        max_running=config.max_running,
        max_queued=config.max_queued,
        threads=config.threads,
        pack=config.pack,
        numerics=numerics(config, holdings.device, fleet.store.codec),
    )
    engine.start()
    worker = Worker(config, holdings, engine, url)
    holdings.load_in_background(engine)
    registry = None if private else Registry(fleet.redis)
    try:
        asyncio.run(serve(worker, registry))
    finally:
        engine.close()
        holdings.close()
    return 0


def _quiet_logs() -> None:
    """JSON lines where nobody watches; no progress bars of libraries; tracebacks without local variables."""
    from transformers.utils import logging as hf

    hf.disable_progress_bar()  # type: ignore[no-untyped-call]
    out = cast(TextIO, LossyStream(sys.stderr))  # structlog needs write and flush
    if sys.stderr.isatty():
        structlog.configure(logger_factory=structlog.WriteLoggerFactory(out))
        return
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.WriteLoggerFactory(out),
    )


def _die_with_parent() -> None:
    """A spawned worker must not outlive its router, however that ends (Linux)."""
    if os.environ.get("TWOLANE_SPAWNED") and sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
