"""What a change of policy does to each tenant: which keys, in which direction, and to which recorded requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from policies.compare import Known, compare, grid
from policies.decide import decide
from policies.facts import Decision, Facts
from policies.policy import Policy
from router import audit_verify
from router.facts_record import NotReplayable, unpack_all
from router.policy_versions import KEYS_BOUND, Change, Version, changes
from router.tenant_config import TenantConfig
from shapes import Invalid

_MORE_WIDENS = frozenset({"rpm_limit", "tpm_limit", "max_parallel_requests", "max_budget", "kv.ttl", "kv.max_bytes"})
"""Limits: null is no limit."""
_LESS_WIDENS = frozenset({"budget_duration", "audit.retention", "audit.shadow_text"})
"""The budget's span; and how long and how often something is kept to be looked at, where null is for ever."""
_ORDERS: dict[str, tuple[object, ...]] = {
    "kv.reuse": ("none", "tenant"),
    "kv.encrypt": (True, False),
    "audit.content": ("full", "hash", "none"),
}
"""From the stricter to the looser value."""


@dataclass(frozen=True, slots=True)
class KeyChange:
    """One key that differs, and what that does by itself."""

    key: str
    old: Any
    new: Any
    direction: str
    """`widens`, `narrows`, `widens and narrows`, `moves`, or `allows the same`."""
    text: str
    example: str = ""
    """Of what is newly allowed."""


@dataclass(slots=True)
class Replayed:
    """Recorded requests of a tenant under both versions. Milliseconds and USD are sums over those that move."""

    requests: int = 0
    moved: dict[str, int] = field(default_factory=dict)
    """How many go from one lane to another, or to another deployment of the same."""
    recorded_ms: float = 0.0
    old_ms: float = 0.0
    """As predicted at the time for the deployment that the old version chooses."""
    new_ms: float = 0.0
    old_usd: float = 0.0
    new_usd: float = 0.0
    unknown: int = 0
    """Requests whose facts are not on record."""


@dataclass(slots=True)
class TenantChange:
    """One tenant that differs between two versions."""

    tenant: str
    state: str
    """`added`, `removed` or `changed`."""
    direction: str
    changes: list[KeyChange]
    together: str = ""
    """An example of what the changes allow together and none of them by itself."""
    replayed: Replayed | None = None

    @property
    def widens(self) -> bool:
        return any("widens" in word for word in (self.direction, *(c.direction for c in self.changes)))

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"{self.tenant}: {self.state}, {self.direction}"
        for change in self.changes:
            yield f"  {change.text} ({change.direction})"
            if change.example:
                yield f"    newly allowed: {change.example}"
        if self.together:
            yield f"  newly allowed by these together: {self.together}"
        if self.replayed is not None:
            yield from _replay_lines(self.replayed)


def compare_versions(old: Version, new: Version, audit: Path | None = None) -> list[TenantChange]:
    """Tenants that differ, by name. Raises AuditError for a log that cannot be read."""
    found = []
    for name in sorted({*old.tenants, *new.tenants}):
        change = _tenant(name, old, new)
        if change is None:
            continue
        before, after = old.tenants.get(name), new.tenants.get(name)
        if audit is not None and before is not None and after is not None:
            change.replayed = _replay(audit, name, before.policy, after.policy)
        found.append(change)
    return found


def _tenant(name: str, old: Version, new: Version) -> TenantChange | None:
    before, after = old.tenants.get(name), new.tenants.get(name)
    if before is None:
        return TenantChange(name, "added", "widens", [])
    if after is None:
        return TenantChange(name, "removed", "narrows", [])
    differing = changes(before, after)
    if not differing:
        return None
    known = _known(old, new)
    whole = compare(before.policy, after.policy, grid([before.policy, after.policy], known))
    told = [_change(change, before, after, known) for change in differing]
    beside = {c.direction for c in told if _top(c.key) not in Policy.model_fields or c.key in ("rules", "regulated")}
    words = {*whole.word.split(" and "), *(word for found in beside for word in found.split(" and "))}
    direction = " and ".join(w for w in ("widens", "narrows") if w in words) or (
        "moves" if "moves" in words else whole.word
    )
    together = "" if any(c.example for c in told) else whole.widens
    return TenantChange(name, "changed", direction, told, together)


def _change(change: Change, old: TenantConfig, new: TenantConfig, known: Known) -> KeyChange:
    """What this key does by itself, all others left as they were."""
    top = _top(change.key)
    if top == "rules":
        # What an own rule says of other requests cannot be known: one that goes may have refused any.
        gone = [r for r in change.old or () if r not in (change.new or ())]
        return KeyChange(change.key, change.old, change.new, "widens" if gone else "narrows", str(change))
    if top not in Policy.model_fields or change.key == KEYS_BOUND:
        return KeyChange(change.key, change.old, change.new, _direction(change, old, new), str(change))
    before = old.policy
    after = _alone(before, new.policy, top)
    moved = compare(before, after, grid([before, after], known))
    if top == "regulated":
        # Whatever the lanes say: without it an answer may leave that is not on record.
        direction = "narrows" if new.regulated else "widens"
        return KeyChange(change.key, change.old, change.new, direction, str(change), moved.widens)
    return KeyChange(change.key, change.old, change.new, moved.word, str(change), moved.widens)


def _alone(old: Policy, new: Policy, key: str) -> Policy:
    """The old policy with this key of the new one; use cases and labels as one where they fit only together."""

    def with_new(keys: set[str]) -> Policy:
        return Policy(**{name: getattr(new if name in keys else old, name) for name in Policy.model_fields})

    try:
        return with_new({key})
    except Invalid:
        return with_new({key, "labels", "use_cases"})


def _direction(change: Change, before: TenantConfig, after: TenantConfig) -> str:
    """Of keys that no decision reads."""
    old, new = change.old, change.new
    if change.key == "audit.hold_stream":
        held, holds = (t.regulated if t.audit.hold_stream is None else t.audit.hold_stream for t in (before, after))
        return "moves" if held == holds else "narrows" if holds else "widens"
    if change.key == "keys":
        more = len(after.key_digests) - len(before.key_digests)
        return "widens" if more > 0 else "narrows" if more < 0 else "moves"
    if change.key == KEYS_BOUND:
        # What the two use cases allow is not compared: the key's requests are judged by another one.
        return "widens"
    if change.key in _ORDERS:
        order = _ORDERS[change.key]
        return "widens" if order.index(new) > order.index(old) else "narrows"
    if change.key in _MORE_WIDENS | _LESS_WIDENS:
        more = new is None or (old is not None and new > old)
        return "widens" if more == (change.key in _MORE_WIDENS) else "narrows"
    if change.key == "guardrails":
        lost, won = set(old or ()) - set(new or ()), set(new or ()) - set(old or ())
        return " and ".join(w for w, there in (("widens", lost), ("narrows", won)) if there) or "moves"
    if _top(change.key) == "classifier":
        # Another classifier may let pass what this one would have labelled.
        return "narrows" if old is None else "widens"
    return "moves"


def _known(*versions: Version) -> Known:
    found = [version.settings for version in versions if version.settings is not None]
    regions = {d.model_info.region for settings in found for d in settings.model_list}
    return Known(
        tuple({group for settings in found for group in settings.groups}),
        tuple({pair.name for settings in found for pair in settings.pairs}),
        tuple(region for region in regions if region is not None),
    )


def _top(key: str) -> str:
    return key.partition(".")[0]


def _replay(audit: Path, tenant: str, old: Policy, new: Policy) -> Replayed:
    told = Replayed()
    moved: Counter[str] = Counter()
    if tenant not in audit_verify.tenants(audit):
        return told
    for record in audit_verify.records(audit, tenant):
        body = record.body
        if body.get("kind") != "outcome" or "decision" not in body:
            continue
        try:
            facts = unpack_all(body.get("facts"))[0]
        except (NotReplayable, IndexError):
            told.unknown += 1
            continue
        told.requests += 1
        was, now = decide(old, facts), decide(new, facts)
        if was.chosen == now.chosen:
            continue
        moved[f"{_lane(was)} -> {_lane(now)}"] += 1
        told.recorded_ms += body.get("total_ms") or 0.0
        (old_ms, old_usd), (new_ms, new_usd) = _predicted(facts, was), _predicted(facts, now)
        told.old_ms += old_ms
        told.new_ms += new_ms
        told.old_usd += old_usd
        told.new_usd += new_usd
    told.moved = dict(moved)
    return told


def _lane(decision: Decision) -> str:
    return next((j.transport for j in decision.judged if j.deployment == decision.chosen), "refused")


def _predicted(facts: Facts, decision: Decision) -> tuple[float, float]:
    """Milliseconds and USD; nothing where it is refused or was not predicted."""
    for deployment in facts.deployments:
        if deployment.id == decision.chosen and deployment.estimate is not None:
            return deployment.estimate.total_p50, deployment.estimate.cost
    return 0.0, 0.0


def _replay_lines(told: Replayed) -> Iterator[str]:
    yield f"  of {told.requests} recorded requests {sum(told.moved.values())} would go elsewhere"
    for way, count in sorted(told.moved.items()):
        yield f"    {way}: {count}"
    if told.moved:
        yield f"    they took {told.recorded_ms:.0f} ms; predicted {told.old_ms:.0f} before, {told.new_ms:.0f} after"
        yield f"    predicted cost {told.old_usd:.6f} USD before, {told.new_usd:.6f} USD after"
    if told.unknown:
        yield f"  {told.unknown} records hold no facts and could not be decided"
