"""TenantConfig: what a person writes about one tenant."""

from __future__ import annotations

import hashlib
import json
import re
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from policies.policy import Policy, Share
from policies.scopes import UseCase
from router.deployments import without_secrets
from router.labels import Classifier
from shapes import BeforeValidator, Field, model_validator
from workers.config import Config, KVPolicy, Span

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})", re.IGNORECASE)


def digest_key(key: object) -> object:
    """A plain key becomes its SHA-256 in hex; `sha256:HEX` (LiteLLM's hashed virtual key) is taken as it is."""
    if not isinstance(key, str):
        return key
    if found := _DIGEST.fullmatch(key.strip()):
        return found[1].lower()
    if key.startswith("sha256:"):
        raise ValueError("sha256: must be followed by 64 hex digits")
    if not key:
        raise ValueError("a key must not be empty")
    return hashlib.sha256(key.encode()).hexdigest()


KeyDigest = Annotated[str, BeforeValidator(digest_key)]


class AuditPolicy(Config):
    """What the record of a request keeps."""

    content: Literal["none", "hash", "full"] = "hash"
    retention: Span | None = None
    """Seconds; null keeps for ever."""
    subject: str | None = Field(None, pattern=r"^(header:)?[A-Za-z0-9_-]{1,64}$")
    """Where a request names the person it is about: a top-level field of the body (`user`), or `header:NAME`. Their
    content gets a key of its own, so that it can be erased or held alone."""
    hold_stream: bool | None = None
    """Whether each piece of a stream is on disk before it is relayed; null means for regulated tenants."""
    shadow_text: Share = 0.0
    """Share of cache-lane answers whose relay twin is run afterwards and stored beside them."""


class BoundUseCase(UseCase):
    """A use case with the keys whose requests belong to it."""

    keys: tuple[KeyDigest, ...] = Field((), repr=False)
    """Keys of this tenant; they need not stand under the tenant's `keys` as well."""

    @property
    def use_case(self) -> UseCase:
        """Without the keys, which are no part of a policy."""
        return UseCase(**{name: getattr(self, name) for name in UseCase.model_fields})


class TenantConfig(Policy):
    """One tenant: LiteLLM's names where it has one, and a policy."""

    extends: str | None = Field(None, exclude=True)
    """Another tenant, or a file beside this one, whose keys hold where this one says nothing."""
    preset: str | None = Field(None, exclude=True)
    """A set of defaults that the router comes with."""
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    key: KeyDigest | None = Field(None, repr=False)
    keys: tuple[KeyDigest, ...] = Field((), repr=False)
    rpm_limit: int | None = Field(None, ge=0)
    tpm_limit: int | None = Field(None, ge=0)
    max_parallel_requests: int | None = Field(None, ge=0)
    max_budget: float | None = Field(None, ge=0, allow_inf_nan=False)
    """USD."""
    budget_duration: Span | None = None
    """Seconds after which the budget starts anew; null never."""
    weight: float = Field(1.0, gt=0, le=1000, allow_inf_nan=False)
    """Share of a busy worker, beside the other tenants'."""
    kv: KVPolicy = KVPolicy.model_construct()
    audit: AuditPolicy = AuditPolicy.model_construct()
    use_cases: tuple[BoundUseCase, ...] = ()
    guardrails: tuple[str, ...] = ()
    """Names among the configuration's `guardrails` that apply besides those that always do."""
    classifier: Classifier | None = None
    """Labels requests by what they say; what it does not answer in time is missing."""

    @model_validator(mode="before")
    @classmethod
    def _regulated_records_all(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("regulated") is True:
            audit = data.get("audit") or {}
            if isinstance(audit, dict) and "content" not in audit:
                return {**data, "audit": {**audit, "content": "full"}}
        return data

    @model_validator(mode="after")
    def _regulated_means_it(self) -> Self:
        if self.regulated and self.audit.content != "full":
            raise ValueError("a regulated tenant's dialogue is recorded: audit.content must be full")
        if self.regulated and "transports" in self.model_fields_set and "cache" in self.transports:
            raise ValueError("a regulated tenant has the text lane only: remove cache from transports")
        return self

    @model_validator(mode="after")
    def _laid_out(self) -> Self:
        if self.extends is not None or self.preset is not None:
            raise ValueError("extends and preset hold only where a tenant is read from a file")
        return self

    @model_validator(mode="after")
    def _keys_lead_somewhere(self) -> Self:
        bound = [key for case in self.use_cases for key in case.keys]
        if len(set(bound)) != len(bound):
            raise ValueError("use_cases: one key is bound to two use cases")
        if self.classifier is not None and not self.labels:
            raise ValueError("a classifier needs labels, whose values it answers with")
        return self

    @property
    def key_digests(self) -> dict[str, str | None]:
        """By key, the use case that it is bound to."""
        plain = (*self.keys, *((self.key,) if self.key else ()))
        return {**dict.fromkeys(plain), **{key: case.id for case in self.use_cases for key in case.keys}}

    @property
    def policy(self) -> Policy:
        """The part that `policies` judges by."""
        written = {name: getattr(self, name) for name in Policy.model_fields}
        return Policy(**written | {"use_cases": tuple(case.use_case for case in self.use_cases)})

    @cached_property
    def record(self) -> bytes:
        """All that is written, defaults filled in, as JSON. Of a key's digest only as much as shows a change."""
        keys = sorted(f"{key[:8]} {case}" if case else key[:8] for key, case in self.key_digests.items())
        return json.dumps(self.without_keys() | {"keys": keys}).encode()

    def written(self) -> dict[str, Any]:
        """What was written and laid under it, for YAML: keys as digests, secrets among options left out."""
        data = self.model_dump(mode="json", exclude_unset=True)
        if self.key is not None:
            data["key"] = f"sha256:{self.key}"
        for holder in (data, *data.get("use_cases", ())):
            if holder.get("keys"):
                holder["keys"] = [f"sha256:{key}" for key in holder["keys"]]
        for hook in (*data.get("rules", ()), data.get("classifier") or {}):
            if "options" in hook:
                hook["options"] = without_secrets(hook["options"])
        return data

    def without_keys(self) -> dict[str, Any]:
        """All that is written but the keys, defaults filled in, for JSON."""
        data = self.model_dump(mode="json", exclude=("key", "keys"))
        for case in data["use_cases"]:
            del case["keys"]
        return data

    @property
    def digest(self) -> str:
        """SHA-256 over `record`."""
        return hashlib.sha256(self.record).hexdigest()
