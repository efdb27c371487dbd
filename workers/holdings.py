"""What one worker holds: models, pairs and the store, loaded as its config says, with the reason where one failed."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog
import torch

from workers import pairs
from workers.config import Fleet, PairConfig, WorkerConfig
from workers.engine import Engine, Event, Request
from workers.errors import LoadFailed, PairNotLoaded, WorkerError
from workers.fusers.base import Fuser
from workers.fusers.identity import IdentityFuser
from workers.loader import Loaded, Loader
from workers.prompt import Prompt
from workers.protocol import ModelState, PairState, WorkerState
from workers.runtime import Alone, Paired, Runtime
from workers.sampling import Sampling
from workers.store import KVStore

log = structlog.get_logger("worker")

_REHEARSAL_TOKENS = 64


class Holdings:
    """`runtimes` fills while loading goes on; readers see whole entries only."""

    def __init__(self, fleet: Fleet, config: WorkerConfig) -> None:
        self._fleet, self._config = fleet, config
        self._loader = Loader(config.device, config.memory)
        self._models: dict[str, ModelState] = {}
        self._pairs: dict[str, PairState] = {}
        self.runtimes: dict[str, Runtime] = {}
        self.store = KVStore(fleet.store, fleet.redis)
        self.loading = True

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
        thread = threading.Thread(target=self._load_all, args=(engine,), name="loader", daemon=True)
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

    def _load_all(self, engine: Engine) -> None:
        for name in self._config.models:
            config = next(m for m in self._fleet.models if m.name == name)
            began = time.monotonic()
            try:
                runtime: Runtime = self._bounded(Alone(name, self._loader.load(config), self.store, self._chunk))
            except WorkerError as error:
                self._models[name] = ModelState(name, "", 0, ready=False, reason=str(error))
                log.error("model not loaded", model=name, reason=str(error))
                continue
            self._rehearse(engine, name, runtime)
            self._models[name] = ModelState(name, runtime.fingerprint, runtime.context)
            log.info("model ready", model=name, seconds=round(time.monotonic() - began, 1))
        for name in self._config.pairs:
            self._load_pair(engine, next(p for p in self._fleet.pairs if p.name == name))
        self.loading = False

    def _load_pair(self, engine: Engine, config: PairConfig) -> None:
        began = time.monotonic()
        try:
            held = hold_pair(self._fleet, config, self._loader, self.store, self._chunk)
        except WorkerError as error:
            self._pairs[config.name] = PairState(
                config.name, "", config.mode or "", config.scope or "", "", 0, ready=False, reason=str(error)
            )
            log.error("pair not loaded", pair=config.name, reason=str(error))
            return
        runtime = self._bounded(held.runtime)
        self._rehearse(engine, config.name, runtime)
        self._pairs[config.name] = msgspec.structs.replace(held.state, context=runtime.context)
        log.info("pair ready", pair=config.name, seconds=round(time.monotonic() - began, 1))

    @property
    def _chunk(self) -> int:
        return self._config.prefill_chunk

    def _bounded(self, runtime: Runtime) -> Runtime:
        if self._config.max_context is not None:
            runtime.context = min(runtime.context, self._config.max_context)
        return runtime

    def _rehearse(self, engine: Engine, name: str, runtime: Runtime) -> None:
        """One short answer: warms caches, and measures the rates that the router's first estimates rest on."""
        self.runtimes[name] = runtime
        tokens = min(_REHEARSAL_TOKENS, runtime.context // 2)
        ids = tuple(i % (runtime.decoder.vocab - 1) for i in range(1, tokens + 1))
        ended = threading.Event()

        def watch(event: Event) -> None:
            if type(event).__name__ in {"Done", "Failed"}:
                ended.set()

        sampling = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)
        engine.submit(Request(name, Prompt(ids, tokens // 2), sampling, watch))
        ended.wait()
        measured = engine.rates.rates().get(name)
        if measured is not None:
            for space in runtime.spaces:
                self.store.rates(prefill_tokens_per_s=measured.prefill_tokens_per_s, space=space)


@dataclass(frozen=True, slots=True)
class HeldPair:
    """A pair that is ready to run, and what is known of it."""

    runtime: Runtime
    state: PairState


def hold_pair(fleet: Fleet, config: PairConfig, loader: Loader, store: KVStore | None, chunk: int) -> HeldPair:
    """Load both models and the fuser. Raises LoadFailed when a part is missing or is not the one the pair names."""
    sharer = loader.load(fleet.model(config.sharer))
    receiver = loader.load(fleet.model(config.receiver))
    folder = fuser_folder(config.fuser)
    file = pairs.read_pair(folder) if folder is not None and (folder / "pair.json").exists() else None
    kind = file.fuser.kind if file is not None else "identity" if config.fuser == "identity" else "c2c"
    mode = config.mode or (file.mode if file else "handover" if kind == "identity" else "fuse")
    scope = config.scope or (file.scope if file else "prompt")
    fuser = load_fuser(kind, folder, sharer, receiver)
    doubt = check_parties(file, sharer, receiver) if file is not None else ""
    runtime: Runtime
    if kind == "identity":
        identity = pairs.fingerprint(
            sharer.identity, receiver.identity, kind=kind, digest=fuser.digest, mode=mode, scope=scope
        )
        runtime = Alone(config.name, sharer, store, chunk, fingerprint=identity, role="source")
    else:
        runtime = Paired(config.name, sharer, receiver, fuser, mode=mode, scope=scope, store=store, chunk=chunk)
    report = pairs.read_report(folder) if folder is not None else None
    state = PairState(config.name, runtime.fingerprint, mode, scope, kind, runtime.context)
    return HeldPair(runtime, with_report(state, report, doubt))


def fuser_folder(fuser: str) -> Path | None:
    """None for a bare `identity`; else a folder, a folder inside an installed package, or one fetched from the hub."""
    if fuser == "identity":
        return None
    path = Path(fuser).expanduser()
    if path.is_dir():
        return path
    if fuser.startswith((".", "/", "~")) or fuser.count("/") < 1:
        raise LoadFailed(f"fuser {fuser!r}: no such folder")
    return _fuser_from_hub(fuser)


def _fuser_from_hub(name: str) -> Path:
    """`owner/repo` or `owner/repo/sub/folder`: the official collection keeps one fuser in each folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    owner, repo, *inside = name.split("/")
    prefix = "/".join(inside)
    patterns = [f"{prefix}/*" if prefix else "*"]
    try:
        root = Path(snapshot_download(f"{owner}/{repo}", allow_patterns=patterns))
    except (RepositoryNotFoundError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise LoadFailed(f"fuser {name!r}: cannot be fetched from the hub ({type(error).__name__})") from error
    return root / prefix if prefix else root


def load_fuser(kind: str, folder: Path | None, sharer: Loaded, receiver: Loaded) -> Fuser:
    """The network between two loaded models. Raises LoadFailed."""
    if kind == "identity":
        return IdentityFuser(sharer.identity, receiver.identity, receiver.shape)
    if folder is None:
        raise LoadFailed(f"a fuser of kind {kind!r} needs a folder")
    if kind == "lite":
        from workers.fusers.lite import LiteFuser

        return LiteFuser.from_folder(folder, receiver.dtype, receiver.device)
    if kind == "c2c":
        return _official(folder, sharer, receiver)
    raise LoadFailed(f"{folder}: fusers of kind {kind!r} are not supported; there are c2c, lite, identity")


def _official(folder: Path, sharer: Loaded, receiver: Loaded) -> Fuser:
    from workers.fusers.c2c import load_official

    official = load_official(folder, receiver=receiver.shape, sharer=sharer.shape, dtype=receiver.dtype)
    if official.aligned or sharer.digests.tokenizer != receiver.digests.tokenizer:
        raise LoadFailed(f"{folder}: its models have different tokenizers; serving aligned pairs is not supported yet")
    if official.include_response:
        raise LoadFailed(f"{folder}: include_response is not served")
    return official.fuser


def check_parties(file: pairs.PairFile, sharer: Loaded, receiver: Loaded) -> str:
    """Weights and tokenizers must be those of `pair.json`, else LoadFailed; a changed template is a doubt, returned."""
    doubt = ""
    for role, party, loaded in (("sharer", file.sharer, sharer), ("receiver", file.receiver, receiver)):
        for part in ("weights", "tokenizer"):
            if getattr(party, part) != getattr(loaded.digests, part):
                raise LoadFailed(f"the {role}'s {part} are not those that the pair {file.name} was made for")
        if party.layers != loaded.identity["layers"]:
            raise LoadFailed(f"the {role} keeps layers {loaded.identity['layers']}; the pair wants {party.layers}")
        if party.template != loaded.digests.template:
            doubt = f"the {role}'s chat template has changed since the pair was proven"
    return doubt


def with_report(state: PairState, report: pairs.Report | None, doubt: str) -> PairState:
    """A report counts only for exactly the pair that runs: same fingerprint, which covers the numerics."""
    if report is None:
        return msgspec.structs.replace(state, verdict="unproven", verdict_reason="no report")
    if report.fingerprint != state.fingerprint:
        return msgspec.structs.replace(
            state, verdict="unproven", verdict_reason="the report is about another fingerprint"
        )
    if doubt:
        return msgspec.structs.replace(state, verdict="unproven", verdict_reason=doubt)
    return msgspec.structs.replace(
        state,
        verdict=report.verdict,
        verdict_reason=report.reason,
        gain=report.gain.low if report.gain else None,
        retention=report.retention.low if report.retention else None,
    )
