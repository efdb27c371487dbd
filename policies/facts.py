"""Facts: all that a rule may look at. Gathered by the router before the decision; nothing here is looked up later.

A fact that is not known is `None`, never a guess: a rule that needs it refuses. The random draw of a weighted shuffle
and the time are facts too, so that a decision can be made again from what was recorded.

Some are made anew for every request: as structs they take a quarter of the time of dataclasses, and the collector need
not walk them. What was not said is left out where they are encoded.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Transport = Literal["text", "cache"]
Hint = Literal["text", "cache", "auto"]


class Estimate(msgspec.Struct, frozen=True, gc=False):
    """Predicted latency in milliseconds, as quantiles, and cost in USD."""

    ttft_p50: float
    ttft_p90: float
    total_p50: float
    total_p90: float
    cost: float = 0.0
    samples: int = 0
    """Answers it was learnt from; 0 is a cold start from measured rates or a configured prior."""


class PairFacts(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What is known of the pair behind a cache-lane deployment."""

    name: str
    fingerprint: str | None
    """Of the pair on a live worker; None when no live worker holds it."""
    mode: str = "fuse"
    scope: str = "prompt"
    verdict: str = "unproven"
    gain: float | None = None
    retention: float | None = None
    reason: str = ""
    """Why it is not available, in the worker's words."""
    demoted: str = ""
    """What it was demoted for; empty where it was not, or its rest is over."""
    probation: float | None = None
    """Share of the requests that may take it while it is on probation; None where it is not."""
    signer: str = ""
    """Public key that signed the pair and its report; empty where nobody did."""


class DeploymentFacts(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One way to answer for the group, as it stands now."""

    id: str
    transport: Transport
    kind: Literal["http", "litellm", "relay", "local", "cache"]
    available: bool = True
    unavailable: str = ""
    region: str | None = None
    pair: PairFacts | None = None
    context: int | None = None
    """Tokens that prompt and answer may hold together; None where the upstream judges."""
    cannot: frozenset[str] = frozenset()
    """Features a request may need that this deployment cannot serve: see `Facts.needs`."""
    estimate: Estimate | None = None
    cooling: bool = False
    in_flight: int = 0
    weight: float = 1.0
    order: int = 1


class Facts(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One request, seen by policy."""

    model: str
    deployments: tuple[DeploymentFacts, ...]
    prompt_tokens: int
    """Counted where a tokenizer is at hand, else estimated from bytes."""
    output_tokens: int
    """What the caller allows at most, or what such calls usually take."""
    needs: frozenset[str] = frozenset()
    """tools | images | audio | json | logprobs | n | … — what the request cannot do without."""
    has_context: bool = True
    """Something stands before the last user message."""
    hint: Hint = "auto"
    budget_hint_ms: float | None = None
    draw: float = 0.0
    """Uniform on [0, 1), drawn outside."""
    now: float = 0.0
    """Unix seconds."""
    stopped: frozenset[str] = frozenset()
    """Stop buttons in force: `cache`, `pair:NAME`, `tenant:NAME`."""
    pinned: str | None = None
    """Deployment narrowed to by the caller."""
    strategy: str = "simple-shuffle"
    """`router_settings.routing_strategy`: how equals within a lane are ordered."""
    last: str | None = None
    """Deployment that answered this conversation before; read only where the policy is sticky, or it is `held`."""
    held: bool = False
    """`last` keeps a response that the request goes on from: no other has it."""
    conversation: float | None = None
    """Digest of the conversation as a number on [0, 1); None where it is not known."""
    labels: dict[str, str] = {}
    """`tenant`, and what the request is labelled as; values that sources did not agree on are joined by commas."""
    use_case: str | None = None
    """That the caller's key is bound to; requests of other keys may belong to one by a label."""
    asked: str = ""
    """The name that the caller asked for, where it is not the group's own: an alias, or one that fits a wildcard."""
    open_ended: bool = False
    """The caller sets no bound on the answer: it may take whatever the prompt leaves of the context."""


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """One rule's answer about one deployment."""

    allowed: bool
    code: str
    """`ok`, or a reason from `policies.rules.REASONS`."""
    detail: str = ""


class Judged(msgspec.Struct, frozen=True, gc=False):
    """A deployment with every rule's verdict, in the rules' order."""

    deployment: str
    transport: Transport
    verdicts: tuple[Verdict, ...]

    @property
    def allowed(self) -> bool:
        return all(v.allowed for v in self.verdicts)


class Decision(msgspec.Struct, frozen=True, gc=False):
    """The choice, with all verdicts. `ranked` holds the survivors: the chosen one, then its fallbacks in order."""

    model: str
    ranked: tuple[str, ...]
    reason: str
    """Why the first of `ranked` was chosen, or the first refusal's code when none survived."""
    judged: tuple[Judged, ...]
    budget_missed: bool = False
    use_cases: tuple[str, ...] = ()
    """Ids of the use cases that the request belongs to."""

    @property
    def chosen(self) -> str | None:
        return self.ranked[0] if self.ranked else None
