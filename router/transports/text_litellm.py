"""The text lane through the litellm package: every provider that does not speak OpenAI's interface itself.

Importing litellm takes seconds and much memory, and its calls cost milliseconds of CPU: both happen in one thread
with an event loop of its own, and only when such a deployment is configured. The router's loop sees finished bytes.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import logging
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Any, TypeVar

import msgspec

from router.asked import tier
from router.call import Call, Reply
from router.deployments import Deployment
from router.errors import Refused, TimedOut, TransportError, Unavailable
from router.source import ConfigError
from router.transports.upstream_errors import CONTEXT_EXCEEDED, read_error, refusal
from router.wire import DONE, error_frame, frame, read_usage

_INSTALL = "pip install 'twolane-router[litellm]'"
_AHEAD = 64
"""Events of a stream that may wait for a slow caller before the provider has to."""
_CLOSE_S = 5.0

_SAMPLING = {"temperature", "top_p", "n", "stop", "max_tokens", "presence_penalty", "frequency_penalty", "logit_bias"}
_COMMON = {"user", "seed", "stream_options"}
_ACCEPTED: Mapping[str, frozenset[str]] = {
    "/chat/completions": frozenset(
        {
            *_SAMPLING,
            *_COMMON,
            "messages",
            "max_completion_tokens",
            "logprobs",
            "top_logprobs",
            "response_format",
            "tools",
            "tool_choice",
            "parallel_tool_calls",
            "functions",
            "function_call",
            "modalities",
            "audio",
            "prediction",
            "reasoning_effort",
            "verbosity",
            "service_tier",
            "web_search_options",
            "prompt_cache_key",
            "safety_identifier",
            "thinking",
            "top_k",
        }
    ),
    "/completions": frozenset({*_SAMPLING, *_COMMON, "prompt", "suffix", "echo", "best_of", "logprobs", "top_k"}),
    "/embeddings": frozenset({"input", "dimensions", "encoding_format", "user", "input_type"}),
}
"""Fields of a body that become arguments of a call. litellm reads its own settings (addresses, keys, callbacks) from
the same arguments, so nothing that is not listed may pass."""
_FUNCTIONS = {
    "/chat/completions": "acompletion",
    "/completions": "atext_completion",
    "/embeddings": "aembedding",
}
_NOT_SENT = frozenset({"model", "stream", "metadata", "store"})
_OURS = frozenset({"timeout", "stream_timeout", "max_retries", "stream_options"})
_PREFIX = re.compile(r"^(?:litellm\.\w+: )*(?:\w+(?:Exception|Error)(?: - |: ))?")
_SUFFIX = re.compile(r"\. Handle with `litellm\.\w+`\.?\s*$")
_TRACEBACK = "Traceback (most recent call last)"
_BYTES = re.compile(r"""b(?P<quote>['"]).*(?P=quote)$""", re.DOTALL)

T = TypeVar("T")


class LiteLLMThread:
    """The one thread all `litellm` deployments share. Starts importing at once; `close` ends it."""

    def __init__(self) -> None:
        """Raises ConfigError when the package is not installed."""
        if find_spec("litellm") is None:
            raise ConfigError(f"a deployment needs the litellm package, which is not installed: {_INSTALL}")
        self._ready: Future[Any] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._main, name="litellm", daemon=True)
        self._thread.start()

    async def module(self) -> Any:
        """The imported package. Raises Unavailable when the import failed."""
        try:
            return await asyncio.shield(asyncio.wrap_future(self._ready))
        except ImportError as error:
            raise Unavailable(f"The litellm package cannot be imported: {error}", code="litellm_broken") from error

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run in the thread; cancelling the future cancels it there. Only after `module`."""
        assert self._loop is not None  # noqa: S101 - set before `module` returns
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Run a plain function in the thread, if it still runs."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    async def close(self) -> None:
        """Cancel what runs and end the thread; an import under way is left to die with the process."""
        self._closing = True
        if self._stop is not None:
            self.call_soon(self._stop.set)
            await asyncio.to_thread(self._thread.join, _CLOSE_S)

    def _main(self) -> None:
        try:
            module = _import()
        except Exception as error:
            # Whatever goes wrong inside a foreign package's import reaches whoever calls.
            failure = error if isinstance(error, ImportError) else ImportError(f"{type(error).__name__}: {error}")
            self._ready.set_exception(failure)
            return
        if not self._closing:
            asyncio.run(self._serve(module))

    async def _serve(self, module: Any) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set_result(module)
        await self._stop.wait()
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        close_clients = getattr(module, "close_litellm_async_clients", None)
        if close_clients is not None:
            await close_clients()


def _import() -> Any:
    # Without it the import tries to fetch a price list from the network.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    module: Any = importlib.import_module("litellm")
    module.suppress_debug_info = True
    for name in ("LiteLLM", "LiteLLM Router", "LiteLLM Proxy"):
        # At lower levels these write prompts.
        logging.getLogger(name).setLevel(logging.WARNING)
    return module


class TextLiteLLM:
    """One deployment called through litellm."""

    def __init__(
        self, deployment: Deployment, thread: LiteLLMThread, *, timeout: float, stream_timeout: float | None = None
    ) -> None:
        """`timeout` and `stream_timeout` are the router's, where the entry has none; the thread stays its owner's."""
        params = deployment.litellm_params
        if params is None:
            raise ValueError(f"deployment {deployment.id} is not called through litellm")
        written = params.for_litellm
        self._deployment = deployment
        self._thread = thread
        self._settings = {k: v for k, v in written.items() if k not in _OURS}
        self._extra_fields = frozenset(written.get("allowed_openai_params") or ())
        self._drop = bool(params.drop_params)
        self._timeout = deployment.timeout or timeout
        self._stream_timeout = params.stream_timeout or (None if deployment.timeout else stream_timeout)
        secrets = (deployment.api_key, *(v for k, v in written.items() if "key" in k or "secret" in k or "token" in k))
        self._secrets = tuple(s for s in secrets if isinstance(s, str) and len(s) >= 8)

    async def send(self, call: Call) -> Reply:
        name = _FUNCTIONS.get(call.path)
        if name is None:
            raise Refused(f"This deployment does not serve {call.path}.", code="unsupported_endpoint")
        arguments = self._arguments(call)
        timeout = (self._stream_timeout if call.stream else None) or self._timeout
        arguments["timeout"] = timeout
        try:
            async with asyncio.timeout(timeout):
                function = getattr(await self._thread.module(), name)
                if call.stream:
                    return await self._stream(function, arguments, call, timeout)
                answer = await asyncio.wrap_future(self._thread.submit(_plain(function, arguments)))
        except TransportError:
            raise
        except TimeoutError as error:
            raise TimedOut("The upstream did not answer in time.") from error
        except Exception as error:
            # litellm raises its own classes, openai's and now and then httpx's; the table tells by status.
            raise self.translate(error, call.path) from None
        body, usage = answer
        reply = Reply(200, "application/json", body, first_frame=time.perf_counter())
        reply.usage.tier = tier(call)
        if usage is not None:
            read_usage(usage, reply.usage)
        return reply

    async def close(self) -> None:
        """Nothing of its own: whoever made the thread closes it."""

    def _arguments(self, call: Call) -> dict[str, Any]:
        accepted = _ACCEPTED[call.path] | self._extra_fields
        arguments = dict(self._settings)
        for name, raw in call.fields.items():
            if name in accepted:
                arguments[name] = msgspec.json.decode(raw)
            elif name not in _NOT_SENT and raw != b"null" and not self._drop:
                raise Refused(
                    f"Unknown or unsupported field {name!r} for this deployment.", param=name, code="unknown_parameter"
                )
        arguments |= {"model": self._deployment.upstream_for(call.model), "num_retries": 0, "max_retries": 0}
        arguments.pop("stream_options", None)
        if call.onward is not None:
            arguments["extra_headers"] = {**(arguments.get("extra_headers") or {}), **call.onward}
        if call.stream:
            arguments |= {"stream": True, "stream_options": {"include_usage": True}}
        return arguments

    async def _stream(
        self, function: Callable[..., Any], arguments: dict[str, Any], call: Call, timeout: float
    ) -> Reply:
        reply = Reply(200, "text/event-stream; charset=utf-8")
        reply.usage.tier = tier(call)
        frames = _Frames(self._thread, reply, call, timeout, self.translate)
        frames.start(function, arguments)
        try:
            await frames.first()
        except BaseException:
            await frames.aclose()
            raise
        reply.first_frame = time.perf_counter()
        reply.frames = frames
        return reply

    def translate(self, error: Exception, path: str) -> TransportError:
        """litellm's exceptions in our words, by their `status_code`."""
        if isinstance(error, TransportError):
            return error
        if type(error).__name__ == "Timeout" or isinstance(error, TimeoutError):
            return TimedOut("The upstream did not answer in time.")
        status = getattr(error, "status_code", None)
        if not isinstance(status, int) or not 400 <= status <= 599:
            return Unavailable(f"The call through litellm failed: {type(error).__name__}.")
        detail = {
            "message": _message(error),
            "type": "invalid_request_error" if status < 500 and status != 429 else None,
            "param": _word(getattr(error, "param", None)),
            "code": _CODES.get(type(error).__name__),
        }
        body = msgspec.json.encode({"error": detail})
        return refusal(status, body, _headers(error), secrets=self._secrets, path=path)


_CODES = {
    "ContextWindowExceededError": CONTEXT_EXCEEDED,
    "ContentPolicyViolationError": "content_policy_violation",
}


def _message(error: Exception) -> str:
    """The provider's own words, where it answered in JSON; else what litellm says, without its additions."""
    said = _SUFFIX.sub("", _PREFIX.sub("", str(getattr(error, "message", error))))
    if _TRACEBACK in said:
        return "The upstream's answer could not be read."
    body = said
    if _BYTES.match(said):
        # While streaming litellm quotes the body as a bytes literal.
        try:
            body = ast.literal_eval(said).decode()
        except (ValueError, SyntaxError):
            return said
    return read_error(body.encode()).message or said


def _word(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _headers(error: Exception) -> Mapping[str, str]:
    found = getattr(error, "litellm_response_headers", None) or {}
    return {"retry-after": found["retry-after"]} if "retry-after" in found else {}


def _encoded(answer: Any) -> tuple[bytes, bytes | None]:
    """The body as JSON, and its usage; nulls that OpenAI always sends are kept, all others left out."""
    fields = answer.model_dump(exclude_none=True, mode="json")
    for choice in fields.get("choices") or ():
        choice.setdefault("finish_reason", None)
        if isinstance(choice.get("message"), dict):
            choice["message"].setdefault("content", None)
    usage = fields.get("usage")
    return msgspec.json.encode(fields), msgspec.json.encode(usage) if usage else None


async def _plain(function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[bytes, bytes | None]:
    return _encoded(await function(**arguments))


class _Frames:
    """A stream that is made in the thread and read in the router's loop. `aclose` ends the call in the thread."""

    def __init__(
        self,
        thread: LiteLLMThread,
        reply: Reply,
        call: Call,
        timeout: float,
        translate: Callable[[Exception, str], TransportError],
    ) -> None:
        self._thread = thread
        self._reply = reply
        self._call = call
        self._timeout = timeout
        self._translate = translate
        self._home = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[bytes, bytes | None] | Exception | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(_AHEAD)
        self._pumping: Future[None] | None = None
        self._first: bytes | None = None
        self._done = False

    def start(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        """Begin the call in the thread."""
        self._pumping = self._thread.submit(self._pump(function, arguments))

    async def _pump(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        """In the thread: chunks to bytes, bytes to the router's loop; last None, or what went wrong."""
        end: Exception | None = None
        stream: Any = None
        try:
            stream = await function(**arguments)
            async for chunk in stream:
                await self._room.acquire()
                self._home.call_soon_threadsafe(self._queue.put_nowait, _encoded(chunk))
        except Exception as error:
            # Told to whoever reads the stream, who translates it.
            end = error
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()
        self._home.call_soon_threadsafe(self._queue.put_nowait, end)

    async def first(self) -> None:
        """Wait until the first frame is there. Raises what ended the call before it."""
        self._first = await self._next()
        if self._first is None:
            raise Unavailable("The upstream's stream ended before the answer began.", code="upstream_malformed")

    async def _next(self) -> bytes | None:
        """The next event the caller may see; None at the end."""
        while True:
            item = await self._queue.get()
            if item is None or isinstance(item, Exception):
                self._done = True
                if item is not None:
                    raise item
                return None
            self._thread.call_soon(self._room.release)
            data, usage = item
            if usage is not None:
                read_usage(usage, self._reply.usage)
            if usage is None or self._call.include_usage:
                return frame(b"", data)
            if kept := _without_usage(data):
                return frame(b"", kept)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._first is not None:
            sent, self._first = self._first, None
            return sent
        if self._done:
            raise StopAsyncIteration
        try:
            async with asyncio.timeout(self._timeout):
                found = await self._next()
        except Exception as error:
            failure = self._translate(error, self._call.path)
            self._reply.error = failure.code or failure.type
            await self.aclose()
            return error_frame(failure)
        return DONE if found is None else found

    async def aclose(self) -> None:
        """Cancel the call, unless it has ended."""
        self._done, self._first = True, None
        if self._pumping is not None:
            self._pumping.cancel()


def _without_usage(data: bytes) -> bytes | None:
    fields = msgspec.json.decode(data, type=dict[str, Any])
    choices = fields.get("choices")
    if not choices or not any(c.get("delta") or c.get("text") or c.get("finish_reason") for c in choices):
        return None
    del fields["usage"]
    return msgspec.json.encode(fields)
