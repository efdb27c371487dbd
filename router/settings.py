"""Settings: the one tree, from a YAML file and TWOLANE_* variables. Frozen."""

from __future__ import annotations

import hashlib
import ipaddress
import os
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from router import layers, litellm_config, source
from router.admin_config import AdminConfig, check_names
from router.deployments import CacheParams as CacheParams
from router.deployments import Deployment as Deployment
from router.deployments import LiteLLMParams as LiteLLMParams
from router.deployments import LocalParams as LocalParams
from router.deployments import ModelInfo as ModelInfo
from router.deployments import RelayParams as RelayParams
from router.deployments import number, price
from router.guardrail_config import GuardrailConfig
from router.price_table import table_path
from router.retries import AllowedFails, RetryPolicy
from router.source import ConfigError as ConfigError
from router.source import Source
from router.tenant_config import TenantConfig
from router.traces import OtelConfig
from router.wildcards import narrowest, parts
from shapes import BeforeValidator, Field, Invalid, model_validator
from workers.config import Config, Fleet, ModelConfig, PairConfig, RedisConfig, Span, StoreConfig, WorkerConfig

PREFIX = "TWOLANE_"
"""Of variables that set keys."""
Strategy = Literal[
    "simple-shuffle",
    "least-busy",
    "latency-based-routing",
    "cost-based-routing",
    "usage-based-routing",
    "usage-based-routing-v2",
]
Fallbacks = tuple[dict[str, tuple[str, ...]], ...]


def _one_or_more(value: object) -> object:
    return (value,) if isinstance(value, str) else value


class Alias(Config):
    """`model_group_alias` in its long form."""

    model: str
    hidden: bool = False


class _Shared(Config):
    """Keys that LiteLLM reads in `router_settings` and in `litellm_settings`; the former win."""

    num_retries: int | None = Field(None, ge=0)
    fallbacks: Fallbacks | None = None
    default_fallbacks: tuple[str, ...] | None = None
    context_window_fallbacks: Fallbacks | None = None
    content_policy_fallbacks: Fallbacks | None = None
    allowed_fails: int | None = Field(None, ge=0)


class RouterSettings(_Shared):
    """`router_settings`."""

    routing_strategy: Strategy = "simple-shuffle"
    model_group_alias: dict[str, str | Alias] = Field(default_factory=dict)
    max_fallbacks: int = Field(5, ge=0)
    retry_after: float = Field(0.0, ge=0)
    timeout: float | None = Field(None, gt=0)
    stream_timeout: float | None = Field(None, gt=0)
    cooldown_time: float = Field(5.0, ge=0)
    disable_cooldowns: bool = False
    enable_pre_call_checks: bool = True
    """Context is always checked where it is known."""
    optional_pre_call_checks: tuple[str, ...] = ()
    """`enforce_model_rate_limits` makes `rpm` and `tpm` of deployments limits under every strategy."""
    default_max_parallel_requests: int | None = Field(None, ge=1)
    retry_policy: RetryPolicy = Field(default_factory=dict)
    model_group_retry_policy: dict[str, RetryPolicy] = Field(default_factory=dict)
    allowed_fails_policy: AllowedFails = Field(default_factory=dict)
    redis_url: str | None = Field(None, repr=False)
    redis_host: str | None = None
    redis_port: int | None = None
    redis_password: str | None = Field(None, repr=False)
    redis_db: int | None = None

    def target(self, alias: str, groups: Container[str]) -> str:
        """The first group that an alias leads to, else the last name. Raises ValueError for a circle."""
        name, passed = alias, list[str]()
        while name in self.model_group_alias and (not passed or name not in groups):
            if name in passed:
                raise ValueError(
                    f"router_settings.model_group_alias goes round in a circle: {' -> '.join([*passed, name])}"
                )
            passed.append(name)
            written = self.model_group_alias[name]
            name = written if isinstance(written, str) else written.model
        return name


class LiteLLMSettings(_Shared):
    """`litellm_settings`."""

    request_timeout: float | None = Field(None, gt=0)
    drop_params: bool = False
    json_logs: bool = False
    turn_off_message_logging: bool = False
    telemetry: bool = False
    forward_traceparent_to_llm_provider: bool = True
    """`traceparent` and `tracestate` of the caller, or of our own traces, go on to upstreams."""


class GeneralSettings(Config):
    """`general_settings`."""

    master_key: str | None = Field(None, min_length=1, repr=False)
    max_request_size_mb: float | None = Field(None, gt=0)


class ServerConfig(Config):
    """Where the router listens."""

    host: str = "127.0.0.1"
    port: int = Field(4000, ge=0, le=65535)


class LogConfig(Config):
    """One structured event per request, on stderr. `auto` is text on a terminal, JSON elsewhere."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "text"] = "auto"


class AnchorConfig(Config):
    """Where signed heads of all chains are handed to, so that nobody here can rewrite history unseen."""

    to: Annotated[tuple[str, ...], BeforeValidator(_one_or_more), Field(min_length=1)]
    """Paths of files, or syslog+udp://, syslog+tcp://, syslog+unix:, http(s):// and s3:// addresses."""
    every: Span = Field(60.0, ge=1)
    """Seconds between two looks."""
    records: int = Field(1000, ge=1)
    """So many new records bring the next look forward."""
    required: bool = False
    """Regulated tenants get no answers while a record has waited longer than `max_lag` to be anchored."""
    max_lag: Span = 300.0
    lock_days: int = Field(0, ge=0)
    """Of s3: days for which each object is locked; the bucket must have object lock on."""
    authorization: str | None = Field(None, repr=False)
    """Of http(s): value of the header of that name."""

    @model_validator(mode="after")
    def _can_be_meant(self) -> Self:
        from router.audit_sinks import sink_of  # few anchor, and it takes 1 % of a start

        for url in self.to:
            sink_of(url)
        return self


class AuditConfig(Config):
    """Where the audit records lie, and where their heads are anchored."""

    dir: Path = Path(".twolane/audit")
    anchor: AnchorConfig | None = None


class StopsConfig(Config):
    """Where the stop buttons stand, and what holds where other routers' cannot be heard."""

    file: Path | None = None
    """None: `stops.yaml` in `state_dir`."""
    without_redis: Literal["go_on", "stop"] = "go_on"
    """`stop`: the cache lane rests while a configured Redis does not answer."""


@dataclass(frozen=True, slots=True)
class Routing:
    """What holds where `router_settings` and `litellm_settings` overlap. Times in seconds."""

    num_retries: int
    timeout: float
    stream_timeout: float
    allowed_fails: int
    cooldown_time: float
    """0 where cooldowns are disabled."""
    fallbacks: Mapping[str, tuple[str, ...]]
    """By group; `*` is the catch-all."""
    default_fallbacks: tuple[str, ...]
    context_window_fallbacks: Mapping[str, tuple[str, ...]]
    content_policy_fallbacks: Mapping[str, tuple[str, ...]]
    max_fallbacks: int
    retry_after: float
    strategy: Strategy
    rates_are_limits: bool
    """`rpm` and `tpm` of deployments are enforced; else they are weights."""
    max_parallel_requests: int | None
    """Of a deployment that has none of its own."""
    retry_policy: Mapping[str, int]
    """Tries after the first, by LiteLLM's kind of error without its suffix."""
    group_retry_policy: Mapping[str, Mapping[str, int]]
    allowed_fails_policy: Mapping[str, int]
    aliases: Mapping[str, str]
    hidden: frozenset[str]
    """Aliases that are not listed under `/v1/models`."""

    def retries(self, group: str, kind: str, own: int | None) -> int:
        """Tries after the first for one kind of error: the group's policy, the general one, else `own`, else ours."""
        for policy in (self.group_retry_policy.get(group), self.retry_policy):
            if policy and (found := policy.get(kind, policy.get("Default"))) is not None:
                return found
        return self.num_retries if own is None else own


class Settings(Config):
    """The whole configuration."""

    model_list: tuple[Deployment, ...] = ()
    models: tuple[ModelConfig, ...] = ()
    pairs: tuple[PairConfig, ...] = ()
    workers: tuple[WorkerConfig, ...] = ()
    redis: RedisConfig = RedisConfig.model_construct()
    store: StoreConfig = StoreConfig.model_construct()
    tenants: Path | tuple[TenantConfig, ...] | None = None
    """A folder with one YAML file per tenant, or the tenants themselves."""
    router_settings: RouterSettings = RouterSettings.model_construct()
    litellm_settings: LiteLLMSettings = LiteLLMSettings.model_construct()
    general_settings: GeneralSettings = GeneralSettings.model_construct()
    guardrails: tuple[GuardrailConfig, ...] = ()
    environment_variables: dict[str, str] = Field(default_factory=dict, repr=False)
    accept_unsupported: tuple[str, ...] = ()
    """Keys that protect and that we do not support, accepted by name all the same."""
    server: ServerConfig = ServerConfig.model_construct()
    log: LogConfig = LogConfig.model_construct()
    otel: OtelConfig | None = None
    audit: AuditConfig = AuditConfig.model_construct()
    prices: Path | None = None
    """Of LiteLLM's shape; None takes the table that the litellm package brings, if it is installed."""
    admins: tuple[AdminConfig, ...] = ()
    """Named administrators, beside the master key."""
    stops: StopsConfig = StopsConfig.model_construct()
    state_dir: Path = Path(".twolane")

    _findings: tuple[litellm_config.Finding, ...] = ()
    _digest: str = ""

    @model_validator(mode="after")
    def _ids_differ(self) -> Self:
        number(self.model_list)
        return self

    @model_validator(mode="after")
    def _aliases_end(self) -> Self:
        for alias in self.router_settings.model_group_alias:
            self.router_settings.target(alias, self.groups)
        return self

    @property
    def findings(self) -> tuple[litellm_config.Finding, ...]:
        """What the file asks for and we do not do; to be named at start."""
        return self._findings

    @cached_property
    def fleet(self) -> Fleet:
        """The part that workers read. Raises ValueError where a name in it leads nowhere."""
        if not (self.models or self.pairs or self.workers):
            return Fleet.model_construct(redis=self.redis, store=self.store)
        return Fleet(models=self.models, pairs=self.pairs, workers=self.workers, redis=self.redis, store=self.store)

    @cached_property
    def groups(self) -> dict[str, tuple[Deployment, ...]]:
        """Deployments by model group, in the file's order."""
        found: dict[str, list[Deployment]] = {}
        for deployment in self.model_list:
            found.setdefault(deployment.model_name, []).append(deployment)
        return {name: tuple(members) for name, members in found.items()}

    @cached_property
    def _wildcards(self) -> tuple[str, ...]:
        return narrowest(self.groups)

    def group(self, model: str) -> str | None:
        """The group that answers for a name: the alias's, the exact one, else the longest wildcard that fits."""
        model = self.routing.aliases.get(model, model)
        if model in self.groups:
            return model
        return next((g for g in self._wildcards if parts(g, model) is not None), None)

    @cached_property
    def routing(self) -> Routing:
        """LiteLLM's settings with its defaults, where ours do not say otherwise."""
        own, shared = self.router_settings, self.litellm_settings

        def pick(name: str, default: Any) -> Any:
            first, second = getattr(own, name), getattr(shared, name)
            return first if first is not None else second if second is not None else default

        timeout = own.timeout or shared.request_timeout or 600.0
        aliases = {alias: own.target(alias, self.groups) for alias in own.model_group_alias}
        return Routing(
            num_retries=pick("num_retries", 2),
            timeout=timeout,
            stream_timeout=own.stream_timeout or timeout,
            allowed_fails=pick("allowed_fails", 3),
            cooldown_time=0.0 if own.disable_cooldowns else own.cooldown_time,
            fallbacks=_joined(pick("fallbacks", ())),
            default_fallbacks=pick("default_fallbacks", ()),
            context_window_fallbacks=_joined(pick("context_window_fallbacks", ())),
            content_policy_fallbacks=_joined(pick("content_policy_fallbacks", ())),
            max_fallbacks=own.max_fallbacks,
            retry_after=own.retry_after,
            strategy=own.routing_strategy,
            rates_are_limits=own.routing_strategy.startswith("usage-based")
            or "enforce_model_rate_limits" in own.optional_pre_call_checks,
            max_parallel_requests=own.default_max_parallel_requests,
            retry_policy=_by_kind(own.retry_policy),
            group_retry_policy={g: _by_kind(p) for g, p in own.model_group_retry_policy.items()},
            allowed_fails_policy=_by_kind(own.allowed_fails_policy),
            aliases=aliases,
            hidden=frozenset(a for a, t in own.model_group_alias.items() if not isinstance(t, str) and t.hidden),
        )

    def with_server(self, host: str | None, port: int | None) -> Settings:
        """The same, listening elsewhere; None keeps what is."""
        told = {key: value for key, value in (("host", host), ("port", port)) if value is not None}
        return self.model_copy(update={"server": self.server.model_copy(update=told)})

    @property
    def digest(self) -> str:
        """SHA-256 of the file as it was written: names this version of the configuration in records."""
        return self._digest

    @property
    def stops_file(self) -> Path:
        """Where the stop buttons stand."""
        return (self.stops.file or self.state_dir / "stops.yaml").resolve()

    @property
    def redis_folder(self) -> Path:
        """Where the embedded Redis has its socket; router and workers of one `state_dir` share it."""
        return self.state_dir.resolve() / "redis"

    @property
    def max_body_bytes(self) -> int:
        """Largest request body taken."""
        return int((self.general_settings.max_request_size_mb or 64) * 2**20)

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the router."""
        return is_loopback(self.server.host)


def is_loopback(host: str) -> bool:
    """`localhost`, 127.0.0.0/8 or ::1."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _by_kind(policy: Mapping[Any, int | None]) -> dict[str, int]:
    return {
        key.removesuffix("Retries").removesuffix("AllowedFails"): count
        for key, count in policy.items()
        if count is not None
    }


def _joined(fallbacks: Fallbacks) -> dict[str, tuple[str, ...]]:
    return {group: others for entry in fallbacks for group, others in entry.items()}


def load(path: str | Path) -> Settings:
    """Read one file. Paths of tenants, models and fusers in it are relative to its folder. Raises ConfigError."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None
    return load_text(text, str(path), folder=path.parent)


def load_text(text: str, name: str = "config", *, folder: Path | None = None) -> Settings:
    """The same from text. Raises ConfigError naming file, line, key and what was expected."""
    written = source.read(text, name)
    findings = litellm_config.unsupported(written)
    litellm_config.refuse(written)
    resolved = layers.expand_listed(source.resolve(written, environment(written)))
    data = litellm_config.supported(resolved.data)
    _anchor(data, folder or Path())
    settings = _validated(data, resolved)
    _check_names(settings, resolved)
    settings._findings = tuple(findings)
    _price(settings, resolved)
    settings._digest = hashlib.sha256(text.encode()).hexdigest()
    return settings


def _price(settings: Settings, resolved: Source) -> None:
    """Raises ConfigError for a table that the file names and that is none."""
    path = settings.prices or table_path()
    if path is None or not any(d.priced_as or d.wild for d in settings.model_list):
        return
    try:
        price(settings.model_list, path)
    except OSError as error:
        raise resolved.error(("prices",), f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise resolved.error(("prices",), str(error)) from None


def environment(written: Source) -> dict[str, str]:
    """The process's variables under those of `environment_variables`, which win as in LiteLLM."""
    own = written.data.get("environment_variables") or {}
    if not isinstance(own, dict):
        raise written.error(("environment_variables",), f"expected a mapping, found {source.kind_of(own)}")
    part = Source(written.name, {"environment_variables": own}, written.root)
    values = source.resolve(part, os.environ).data["environment_variables"]
    return {**os.environ, **{str(k): str(v) for k, v in values.items()}}


def _anchor(data: dict[str, Any], folder: Path) -> None:
    """Make paths of inputs absolute where they exist beside the file; others stay as written."""
    if isinstance(data.get("tenants"), str):
        data["tenants"] = str(folder.resolve() / data["tenants"])
    _beside(data, "prices", folder)
    for entry in _entries(data, "models"):
        _beside(entry, "model", folder)
    for pair in _entries(data, "pairs"):
        _beside(pair, "fuser", folder)
        if isinstance(pair.get("fusers"), list):
            pair["fusers"] = [_placed(fuser, folder) for fuser in pair["fusers"]]
        sharers = pair["sharers"] if isinstance(pair.get("sharers"), list) else []
        for model in (pair.get("sharer"), pair.get("receiver"), *sharers):
            if isinstance(model, dict):
                _beside(model, "model", folder)


def _entries(data: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The mappings listed under a key; what has another shape is left to validation."""
    listed = data.get(key)
    return [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []


def _beside(entry: dict[str, Any], key: str, folder: Path) -> None:
    if key in entry:
        entry[key] = _placed(entry[key], folder)


def _placed(value: Any, folder: Path) -> Any:
    if isinstance(value, str) and value and value != "identity":
        place = folder / value
        # os.path answers False where pathlib raises: a name too long, a NUL.
        if os.path.exists(place):
            return str(place.resolve())
    return value


def _validated(data: dict[str, Any], resolved: Source) -> Settings:
    bad = [key for key in data if not isinstance(key, str)]
    if bad:
        raise resolved.error((str(bad[0]),), "expected text as a key")
    try:
        settings = _with_variables(data) if _variables() else Settings(**data)
        _ = settings.fleet, settings.routing
    except Invalid as error:
        raise _from_variable(error) or resolved.invalid(error) from None
    return settings


def _with_variables(data: dict[str, Any]) -> Settings:
    from router.variables import with_variables

    return with_variables(data)


def _variables() -> set[str]:
    """Variables, in capitals, that set keys of ours."""
    names = {name.upper() for name in os.environ if name.upper().startswith(PREFIX)}
    keys = {key.upper() for key in Settings.model_fields}
    return {name for name in names if name.removeprefix(PREFIX).partition("__")[0] in keys}


def _from_variable(error: Invalid) -> ConfigError | None:
    """The same complaint about a TWOLANE_ variable, where one set this very key."""
    found = error.complaints
    set_here = _variables()
    for depth in range(len(found[0].loc), 0, -1):
        name = PREFIX + "__".join(str(step).upper() for step in found[0].loc[:depth])
        if name in set_here:
            # Both arms of a union complain; the one that got further in is the one that was meant.
            deepest = max(found, key=lambda c: len(c.loc))
            return ConfigError(f"environment variable {name}: {source.complaint(deepest)}")
    return None


def _check_names(settings: Settings, resolved: Source) -> None:
    """Names that one part of the file uses and another must define. Raises ConfigError at the use."""
    wrong = check_names(settings.admins, settings.general_settings.master_key)
    if wrong is not None:
        raise resolved.error(("admins", wrong[0], wrong[1]), wrong[2])
    models, pairs = {m.name for m in settings.models}, {p.name for p in settings.pairs}
    for index, deployment in enumerate(settings.model_list):
        at: source.Path_ = ("model_list", index)
        if deployment.cache_params is not None and deployment.cache_params.pair not in pairs:
            problem = f"{deployment.cache_params.pair!r} is not among pairs: {sorted(pairs)}"
            raise resolved.error((*at, "cache_params", "pair"), problem)
        if deployment.local_params is not None and deployment.local_params.model not in models:
            problem = f"{deployment.local_params.model!r} is not among models: {sorted(models)}"
            raise resolved.error((*at, "local_params", "model"), problem)
        if deployment.relay_params is not None:
            for role in ("sharer", "receiver"):
                group = getattr(deployment.relay_params, role)
                if settings.group(group) is None:
                    raise resolved.error((*at, "relay_params", role), f"{group!r} is not a model group of model_list")
                if all(d.kind in ("relay", "cache") for d in settings.groups[settings.group(group) or group]):
                    problem = f"{group!r} has no deployment that a relay may use (litellm_params or local_params)"
                    raise resolved.error((*at, "relay_params", role), problem)
