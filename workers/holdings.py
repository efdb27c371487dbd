"""What one worker holds: models, pairs and the store, loaded as its config says, with the reason where one failed."""

from __future__ import annotations

import os
import queue
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog
import torch

from workers import memory, pairs, vocabulary
from workers.config import Fleet, ModelConfig, PairConfig, WorkerConfig
from workers.engine import Done, Engine, Event, Failed, Request
from workers.errors import LoadFailed, PairNotLoaded, WorkerError
from workers.fusers.base import Fuser
from workers.fusers.identity import IdentityFuser
from workers.loader import Loaded, Loader
from workers.memory import Budget
from workers.protocol import ModelState, PairState, WorkerState
from workers.runtime import Alone, Paired, Runtime
from workers.sampling import Sampling
from workers.store import KVStore

if TYPE_CHECKING:
    from workers.fusers.c2c import Official

log = structlog.get_logger("worker")

_REHEARSAL_TOKENS = 64


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
        counts = dict.fromkeys(self.store.counters.NAMES, 0)
        for (name, _, _), count in self.store.counters.snapshot().items():
            counts[name] += count
        return {**self.store.stats(), "counters": counts}

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
        sharer, receiver = (self._fleet.model(ref) for ref in (config.sharer, config.receiver))
        folder = fuser_folder(config.fuser)
        kind, cpu = fuser_kind(config, folder), self._on_cpu
        if kind == "identity" or folder is None:
            needs = memory.model_needs(memory.size_of(sharer), self._config, cpu=cpu)
        else:
            needs = memory.pair_needs(
                memory.size_of(sharer),
                memory.size_of(receiver),
                memory.fuser_part(folder, kind, receiver.dtype),
                self._config,
                cpu=cpu,
                own=pair_mode(config, folder, kind) == "fuse",
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
        sampling = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)
        ended: queue.SimpleQueue[Done | Failed] = queue.SimpleQueue()

        def watch(event: Event) -> None:
            if isinstance(event, Done | Failed):
                ended.put(event)

        self.runtimes[name] = runtime
        try:
            for _ in range(2):
                engine.rates.forget(name)
                engine.submit(Request(name, prompt, sampling, watch))
                if isinstance(end := ended.get(), Failed):
                    raise end.error
        except WorkerError:
            del self.runtimes[name]
            raise
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
    kind = fuser_kind(config, folder)
    mode = pair_mode(config, folder, kind)
    scope = config.scope or (file.scope if file else "prompt")
    doubt = check_parties(file, sharer, receiver) if file is not None else ""
    runtime: Runtime
    if kind == "identity":
        digest = IdentityFuser(sharer.identity, receiver.identity, receiver.shape).digest
        identity = pairs.fingerprint(
            sharer.identity, receiver.identity, kind=kind, digest=digest, mode=mode, scope=scope
        )
        runtime = Alone(config.name, sharer, store, chunk, fingerprint=identity, role="source")
    elif kind == "c2c" and folder is not None:
        runtime = _official(config.name, folder, sharer, receiver, mode=mode, scope=scope, store=store, chunk=chunk)
    else:
        fuser = load_fuser(kind, folder, receiver, mode)
        _require_mode(config.name, fuser, mode)
        runtime = Paired(config.name, sharer, receiver, fuser, mode=mode, scope=scope, store=store, chunk=chunk)
    report = pairs.read_report(folder) if folder is not None else None
    state = PairState(config.name, runtime.fingerprint, mode, scope, kind, runtime.context)
    return HeldPair(runtime, with_report(state, report, doubt))


def fuser_kind(config: PairConfig, folder: Path | None) -> str:
    """What `pair.json` says; a folder without one is a checkpoint in the official layout."""
    if folder is not None and (folder / "pair.json").exists():
        return pairs.read_pair(folder).fuser.kind
    return "identity" if config.fuser == "identity" else "c2c"


def pair_mode(config: PairConfig, folder: Path | None, kind: str) -> str:
    """As the config says, else `pair.json`, else what the kind is made for."""
    if config.mode is not None:
        return config.mode
    if folder is not None and (folder / "pair.json").exists():
        return pairs.read_pair(folder).mode
    return "handover" if kind == "identity" else "fuse"


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


def load_fuser(kind: str, folder: Path | None, receiver: Loaded, mode: str) -> Fuser:
    """Our own networks. Raises LoadFailed."""
    if folder is None:
        raise LoadFailed(f"a fuser of kind {kind!r} needs a folder")
    if kind == "lite":
        from workers.fusers.lite import LiteFuser

        return LiteFuser.from_folder(folder, receiver.dtype, receiver.device)
    if kind == "linear":
        from workers.fusers.linear import LinearFuser

        return LinearFuser.from_folder(folder, receiver.dtype, receiver.device, mode=mode)
    raise LoadFailed(f"{folder}: fusers of kind {kind!r} are not supported; there are c2c, lite, linear, identity")


def _require_mode(name: str, fuser: Fuser, mode: str) -> None:
    """A fuser is made for one mode: with the receiver's own KV, or without."""
    able = "fuse" if fuser.needs_own else "handover"
    if mode != able:
        raise LoadFailed(f"pair {name}: a {fuser.kind} fuser runs in mode {able}, not {mode}")


def _official(
    name: str,
    folder: Path,
    sharer: Loaded,
    receiver: Loaded,
    *,
    mode: str,
    scope: str,
    store: KVStore | None,
    chunk: int,
) -> Runtime:
    """A published checkpoint, run as its recipe says."""
    from workers.fusers.c2c import load_official

    official = load_official(
        folder, receiver=receiver.shape, sharer=sharer.shape, dtype=receiver.dtype, device=receiver.device
    )
    _require_mode(name, official.fuser, mode)
    if official.include_response:
        raise LoadFailed(
            f"{folder}: its recipe is include_response, three passes for every token of the answer, which cannot join "
            "a running batch; it is not served"
        )
    if official.aligned:
        return _aligned(name, folder, sharer, receiver, official, scope=scope, chunk=chunk)
    if sharer.digests.tokenizer != receiver.digests.tokenizer:
        overlap = vocabulary.compare(receiver.tokenizer.get_vocab(), sharer.tokenizer.get_vocab(), sharer.vocab)
        if not overlap.ids_pass:
            raise LoadFailed(
                f"{folder}: its recipe gives the receiver's token ids to the sharer as they are, and {overlap}"
            )
    # The official method trains and serves without thinking.
    return Paired(
        name, sharer, receiver, official.fuser, mode=mode, scope=scope, store=store, chunk=chunk,
        recipe=official.recipe, template={"enable_thinking": False},
    )  # fmt: skip


def _aligned(
    name: str, folder: Path, sharer: Loaded, receiver: Loaded, official: Official, *, scope: str, chunk: int
) -> Runtime:
    from workers.official_runtime import AlignedPair

    if scope != "prompt":
        raise LoadFailed(f"{folder}: a pair with two tokenizers fuses all messages; its scope is prompt, not {scope}")
    for role, model in (("sharer", sharer), ("receiver", receiver)):
        if model.tokenizer.chat_template is None:
            raise LoadFailed(f"{folder}: the {role} has no chat template, so chats cannot be aligned")
    return AlignedPair(name, sharer, receiver, official, chunk=chunk)


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
