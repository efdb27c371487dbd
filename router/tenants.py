"""TenantSource: API key -> Tenant. Holds digests of keys only."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from policies.policy import Policy
from router import layers, source
from router.labels import Labeller
from router.settings import Settings
from router.source import ConfigError, Source
from router.tenant_config import AuditPolicy as AuditPolicy
from router.tenant_config import TenantConfig, digest_key
from shapes import Invalid
from workers.config import KVPolicy

DEFAULT = "default"

Stamps = dict[Path, tuple[int, int] | None]
"""When files were last written (ns), and their sizes."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks, what policy allows them, and what is kept of it."""

    name: str
    policy: Policy = field(default_factory=Policy)
    kv: KVPolicy = field(default_factory=KVPolicy)
    audit: AuditPolicy = field(default_factory=AuditPolicy)
    rpm_limit: int | None = None
    tpm_limit: int | None = None
    max_parallel_requests: int | None = None
    max_budget: float | None = None
    budget_duration: float | None = None
    weight: float = 1.0
    digest: str = ""
    """SHA-256 of `record`: names the policy in the audit log."""
    record: bytes = field(default=b"", repr=False)
    """What is written about the tenant, as `TenantConfig.record`."""
    use_case: str | None = None
    """Of the policy's use cases, the one that the key at hand is bound to."""
    guardrails: tuple[str, ...] = ()
    """Those that apply besides the ones that always do."""
    labeller: Labeller | None = None
    """Where the policy asks for labels."""

    @classmethod
    def of(cls, config: TenantConfig) -> Tenant:
        return cls(
            name=config.name,
            policy=config.policy,
            kv=config.kv,
            audit=config.audit,
            rpm_limit=config.rpm_limit,
            tpm_limit=config.tpm_limit,
            max_parallel_requests=config.max_parallel_requests,
            max_budget=config.max_budget,
            budget_duration=config.budget_duration,
            weight=config.weight,
            digest=config.digest,
            record=config.record,
            guardrails=config.guardrails,
            labeller=Labeller(config.labels, config.classifier) if config.labels else None,
        )


@dataclass(frozen=True, slots=True)
class Change:
    """What a reload did, by tenant name."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    """Of another digest than before; new keys count."""

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


@dataclass(frozen=True, slots=True)
class _Known:
    """One consistent state; replaced as a whole."""

    by_name: dict[str, Tenant]
    by_digest: dict[str, tuple[str, Tenant]]
    keyless: Tenant | None
    """Who asks when no key is sent."""
    open: bool
    """Nobody has a key: any key is as good as none, as in LiteLLM without a master key."""
    master: str | None
    """Digest of the master key."""


class TenantSource:
    """All tenants. `find` is called once per request; `changed` and `reload` from a timer or SIGHUP."""

    def __init__(self, settings: Settings, *, loopback: bool | None = None) -> None:
        """`loopback`: whether only this machine reaches the router; None reads it from the settings.

        Raises ConfigError: a tenant file that cannot be meant, or a name or key used twice.
        """
        self._settings = settings
        self._loopback = settings.loopback if loopback is None else loopback
        self._bases: Stamps = {}
        self._seen = self._stamp(settings)
        self._known = self._read(settings)

    def find(self, key: str | None) -> Tenant | None:
        """The tenant of a key; None where the key is unknown, or missing though one is needed."""
        known = self._known
        if key is None or known.open:
            return known.keyless
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
        entry = known.by_digest.get(digest)
        # The lookup leaks at most which digests share a hash bucket; the comparison itself takes constant time.
        return entry[1] if entry is not None and hmac.compare_digest(entry[0], digest) else None

    def is_admin(self, key: str | None) -> bool:
        """Whether the key is the master key; without one, whether the router is open to this machine only."""
        master = self._known.master
        if master is None:
            return self._loopback
        digest = hashlib.sha256((key or "").encode("utf-8", "surrogateescape")).hexdigest()
        return hmac.compare_digest(master, digest)

    @property
    def names(self) -> tuple[str, ...]:
        """All tenants that a call may belong to."""
        return tuple(self._known.by_name)

    @property
    def digests(self) -> dict[str, str]:
        """Of each tenant's policy, by name."""
        return {name: tenant.digest for name, tenant in self._known.by_name.items()}

    def get(self, name: str) -> Tenant | None:
        """By name."""
        return self._known.by_name.get(name)

    @property
    def needs_key(self) -> bool:
        """Whether a call without a key is refused."""
        return self._known.keyless is None

    @property
    def has_keys(self) -> bool:
        """Whether anybody has a key."""
        return bool(self._known.by_digest)

    def changed(self) -> bool:
        """Whether a tenant file, or what one extends, is another one than at the last reading, good or not."""
        return self._stamp(self._settings) != self._seen or any(_stamp_of(f) != s for f, s in self._bases.items())

    def reload(self, settings: Settings | None = None) -> Change:
        """Read all tenants again, from new settings if given. Raises ConfigError, and then keeps what was."""
        wanted = settings or self._settings
        self._seen, seen = self._stamp(self._settings), self._stamp(wanted)
        known = self._read(wanted)
        old = self._known.by_name
        self._settings, self._known, self._seen = wanted, known, seen
        return Change(
            added=tuple(n for n in known.by_name if n not in old),
            removed=tuple(n for n in old if n not in known.by_name),
            changed=tuple(n for n, t in known.by_name.items() if n in old and old[n].digest != t.digest),
        )

    def _stamp(self, settings: Settings) -> Stamps:
        """The folder's files as they are now."""
        folder = settings.tenants
        if not isinstance(folder, Path) or not os.path.isdir(folder):
            return {}
        try:
            return {file: _stamp_of(file) for file in tenant_files(folder)}
        except OSError:  # the folder went away: the next look sees it
            return {}

    def _read(self, settings: Settings) -> _Known:
        written = settings.tenants
        self._bases = {}
        configs = _folder(written, settings, self._bases) if isinstance(written, Path) else tuple(written or ())
        guardrails = {one.guardrail_name for one in settings.guardrails}
        by_name: dict[str, Tenant] = {}
        by_digest: dict[str, tuple[str, Tenant]] = {}
        for config in configs:
            unknown = next((n for n in config.guardrails if n not in guardrails), None)
            if unknown is not None:
                raise ConfigError(f"tenants: {config.name!r} names the guardrail {unknown!r}, which is not configured")
            if config.name in by_name:
                raise ConfigError(f"tenants: the name {config.name!r} is used twice")
            tenant = by_name[config.name] = Tenant.of(config)
            for digest, case in config.key_digests.items():
                if digest in by_digest:
                    other = by_digest[digest][1].name
                    raise ConfigError(f"tenants: {other!r} and {config.name!r} have the same key")
                by_digest[digest] = (digest, tenant if case is None else replace(tenant, use_case=case))
        default = by_name.get(DEFAULT) or Tenant.of(TenantConfig(name=DEFAULT))
        keyless = None
        written_key = settings.general_settings.master_key
        master = None if written_key is None else str(digest_key(written_key))
        if master is not None:
            by_digest.setdefault(master, (master, default))
            if by_digest[master][1].name == DEFAULT:
                by_name.setdefault(DEFAULT, default)
        elif self._loopback:
            keyless = by_name.setdefault(DEFAULT, default)
        return _Known(by_name, by_digest, keyless, keyless is not None and not by_digest, master)


def tenant_files(folder: Path) -> Iterable[Path]:
    """The folder's YAML files by name; hidden ones are left out."""
    return sorted(f for f in folder.iterdir() if f.suffix in (".yaml", ".yml") and not f.name.startswith("."))


def _folder(folder: Path, settings: Settings, bases: Stamps) -> tuple[TenantConfig, ...]:
    if not os.path.isdir(folder):
        raise ConfigError(f"tenants: {folder} is not a folder")
    return tuple(read_tenant(f, settings.environment_variables, bases) for f in tenant_files(folder))


def read_tenant(file: Path, variables: Mapping[str, str] | None = None, bases: Stamps | None = None) -> TenantConfig:
    """One tenant file. Raises ConfigError naming file, line, key and what was expected."""
    written = written_tenant(file, variables, bases)
    try:
        return TenantConfig(**{str(k): v for k, v in written.data.items()})
    except Invalid as error:
        raise written.invalid(error) from None


def written_tenant(file: Path, variables: Mapping[str, str] | None = None, bases: Stamps | None = None) -> Source:
    """A tenant file over what it extends, references resolved; notes in `bases` what it extends. Raises ConfigError."""
    environ = {**os.environ, **(variables or {})}

    def read(name: str, at: Source) -> Source:
        return _read_file(_base(name, at, {} if bases is None else bases))

    layered = layers.laid(layers.layers_of(_read_file(file), read))
    resolved = tuple(source.resolve(layer, environ) for layer in layered.layers)
    return layers.laid(resolved)


def _base(name: str, at: Source, looked_for: Stamps) -> Path:
    """`extends: bank` is the file `bank.yaml` beside the one that says so; with a suffix it is a path from there."""
    folder = Path(at.name).parent
    beside = [folder / name] if name.endswith((".yaml", ".yml")) else [folder / f"{name}{s}" for s in (".yaml", ".yml")]
    looked_for.update((file, _stamp_of(file)) for file in beside)
    found = next((file for file in beside if file.is_file()), None)
    if found is None:
        raise at.error(("extends",), f"there is no file {beside[0]}")
    return found


def _read_file(file: Path) -> Source:
    try:
        return source.read(file.read_text(encoding="utf-8"), str(file))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: is not UTF-8 text") from None


def _stamp_of(file: Path) -> tuple[int, int] | None:
    """Tells one writing of a file from another; None while it is not there."""
    try:
        told = file.stat()
    except OSError:
        return None
    return told.st_mtime_ns, told.st_size
