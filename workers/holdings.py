"""What one worker holds: models, pairs and the store, loaded as its config says, with the reason where one failed."""

from __future__ import annotations

import os
import queue
import threading
import time
import traceback

import msgspec
import structlog
import torch

from workers import memory
from workers.config import Fleet, ModelConfig, PairConfig, WorkerConfig
from workers.engine import Engine
from workers.errors import LoadFailed, NoNumbers, Overloaded, PairNotLoaded, WorkerError
from workers.fusers.c2c import includes_response
from workers.jobs import Done, Event, Failed, Request
from workers.loader import Loader
from workers.memory import Budget
from workers.pairing import fuser_folder, fuser_kind, hold_pair, pair_mode
from workers.prompt import Prompt
from workers.protocol import KVCount, ModelState, PairState, WorkerState
from workers.runtime import Alone, Runtime
from workers.sampling import Sampling
from workers.store import KVStore

log = structlog.get_logger("worker")

_REHEARSAL_TOKENS = 64
_AGAIN_S = 0.2
"""Between two tries of a rehearsal while callers fill the queue."""


class Holdings:
    """`runtimes` fills while loading goes on; readers see whole entries only."""

    def __init__(self, fleet: Fleet, config: WorkerConfig) -> None:
        self._fleet, self._config = fleet, config
        self._loader = Loader(config.device, config.memory)
        self._budget = Budget(config.memory)
        self._models: dict[str, ModelState] = {}
        self._pairs: dict[str, PairState] = {}
        self.runtimes: dict[str, Runtime] = {}
        self.store = KVStore(fleet.store, fleet.redis)
        self.loading = True

    @property
    def device(self) -> torch.device:
        return self._loader.device

    @property
    def models(self) -> tuple[ModelState, ...]:
        return tuple(self._models.values())

    @property
    def pairs(self) -> tuple[PairState, ...]:
        return tuple(self._pairs.values())

    def runtime(self, name: str) -> Runtime:
        """Raises PairNotLoaded, with the reason where loading failed."""
        found = self.runtimes.get(name)
        if found is not None:
            return found
        state = self._pairs.get(name) or self._models.get(name)
        why = f": {state.reason}" if state is not None and state.reason else ""
        raise PairNotLoaded(f"this worker holds no model or pair named {name!r}{why}")

    def load_in_background(self, engine: Engine) -> threading.Thread:
        """Load all that the config names; each is measured once through the engine before it counts as ready."""
        thread = threading.Thread(target=self._load_or_end, args=(engine,), name="loader", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Flush and close the store."""
        self.store.close()

    def free_bytes(self) -> int:
        """Device memory that is free now."""
        if self._loader.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self._loader.device)[0])
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def kv(self) -> dict[str, object]:
        """What the store holds now, and its counters since this process began: a total for each name."""
        counts: dict[str, float] = dict.fromkeys(self.store.counters.NAMES, 0)
        for (name, _, _), count in self.store.counters.snapshot().items():
            counts[name] += count
        return {**self.store.stats(), "counters": counts}

    def counted(self) -> tuple[KVCount, ...]:
        """The store's counters, for the heartbeat."""
        return tuple(KVCount(*label, count) for label, count in sorted(self.store.counters.snapshot().items()))

    def metrics(self, state: WorkerState) -> bytes:
        """Prometheus text."""
        lines = [
            "# TYPE twolane_worker_running gauge",
            f"twolane_worker_running {state.running}",
            "# TYPE twolane_worker_queued gauge",
            f"twolane_worker_queued {state.queued}",
        ]
        known = ""
        for (name, tier, role), count in sorted(self.store.counters.snapshot().items()):
            if name != known:
                lines.append(f"# TYPE twolane_kv_{name}_total counter")
                known = name
            lines.append(f'twolane_kv_{name}_total{{tier="{tier}",role="{role}"}} {count}')
        return ("\n".join(lines) + "\n").encode()

    # -- loading ------------------------------------------------------------------------------------------------

    def _load_or_end(self, engine: Engine) -> None:
        """What nobody foresaw while loading ends the process, as in the engine: it would be `loading` for ever."""
        try:
            self._load_all(engine)
        except Exception:
            log.critical("loading failed", trace=traceback.format_exc())
            os._exit(1)

    def _load_all(self, engine: Engine) -> None:
        for name in self._config.models:
            config = next(m for m in self._fleet.models if m.name == name)
            began = time.monotonic()
            try:
                self._promise_model(config)
                runtime: Runtime = self._bounded(Alone(name, self._loader.load(config), self.store, self._chunk))
                self._rehearse(engine, name, runtime)
            except WorkerError as error:
                self._models[name] = ModelState(name, "", 0, ready=False, reason=str(error))
                log.error("model not loaded", model=name, reason=str(error))
                continue
            self._models[name] = ModelState(name, runtime.fingerprint, runtime.context)
            log.info("model ready", model=name, seconds=round(time.monotonic() - began, 1))
        for name in self._config.pairs:
            self._load_pair(engine, next(p for p in self._fleet.pairs if p.name == name))
        self.loading = False

    def _load_pair(self, engine: Engine, config: PairConfig) -> None:
        began = time.monotonic()
        try:
            self._promise_pair(config)
            held = hold_pair(self._fleet, config, self._loader, self.store, self._chunk)
            runtime = self._bounded(held.runtime)
            self._rehearse(engine, config.name, runtime)
        except WorkerError as error:
            self._pairs[config.name] = PairState(
                config.name, "", config.mode or "", config.scope or "", "", 0, ready=False, reason=str(error)
            )
            log.error("pair not loaded", pair=config.name, reason=str(error))
            return
        self._pairs[config.name] = msgspec.structs.replace(held.state, context=runtime.context)
        log.info("pair ready", pair=config.name, seconds=round(time.monotonic() - began, 1))

    def _promise_model(self, config: ModelConfig) -> None:
        if self._budget.limit is not None:
            needs = memory.model_needs(memory.size_of(config), self._config, cpu=self._on_cpu)
            self._budget.promise(f"model {config.name}", needs)

    def _promise_pair(self, config: PairConfig) -> None:
        """Before anything of it is loaded."""
        if self._budget.limit is None:
            return
        sharers = [memory.size_of(self._fleet.model(ref)) for ref in config.parties]
        receiver = self._fleet.model(config.receiver)
        folders = [fuser_folder(fuser) for fuser in config.fusers or (config.fuser,)]
        kind, cpu = fuser_kind(config, folders[0]), self._on_cpu
        if kind == "identity":
            needs = memory.model_needs(sharers[0], self._config, cpu=cpu)
        else:
            fusers: memory.Parts = {}
            for folder in folders:
                fusers |= memory.fuser_part(folder, kind, receiver.dtype) if folder is not None else {}
            needs = memory.pair_needs(
                sharers,
                memory.size_of(receiver),
                fusers,
                self._config,
                cpu=cpu,
                own=pair_mode(config, folders[0], kind) == "fuse",
                response=kind == "c2c" and folders[0] is not None and includes_response(folders[0]),
            )
        self._budget.promise(f"pair {config.name}", needs)

    @property
    def _on_cpu(self) -> bool:
        return self._loader.device.type == "cpu"

    @property
    def _chunk(self) -> int:
        return self._config.prefill_chunk

    def _bounded(self, runtime: Runtime) -> Runtime:
        if self._config.max_context is not None:
            runtime.context = min(runtime.context, self._config.max_context)
        return runtime

    def _rehearse(self, engine: Engine, name: str, runtime: Runtime) -> None:
        """Two short answers: the first warms caches, the second gives the rates that first estimates rest on.

        Raises what they fail with: what cannot answer now will not answer later.
        """
        prompt = runtime.rehearsal(min(_REHEARSAL_TOKENS, runtime.context // 2))
        self.runtimes[name] = runtime
        try:
            for _ in range(2):
                engine.rates.forget(name)
                _answer(engine, name, prompt, Sampling(temperature=0.0, max_tokens=8, ignore_eos=True))
        except NoNumbers as error:
            del self.runtimes[name]
            raise LoadFailed(f"{name}: what it computes are no numbers; its weights are spoilt, or overflow") from error
        except WorkerError:
            del self.runtimes[name]
            raise
        measured = engine.rates.rates().get(name)
        if measured is not None:
            for space in runtime.spaces:
                self.store.rates(prefill_tokens_per_s=measured.prefill_tokens_per_s, space=space)


def _answer(engine: Engine, name: str, prompt: Prompt, sampling: Sampling) -> None:
    """Waits for its end. Asks again while callers fill the queue; raises what it fails with otherwise."""
    while True:
        events = queue.SimpleQueue[Event]()
        try:
            engine.submit(Request(name, prompt, sampling, events.put))
            _until_done(events)
            return
        except Overloaded:
            if not engine.alive:
                raise
            time.sleep(_AGAIN_S)


def _until_done(events: queue.SimpleQueue[Event]) -> None:
    while not isinstance(event := events.get(), Done):
        if isinstance(event, Failed):
            raise event.error
