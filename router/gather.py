"""Gathers the facts of a call: all that policy may look at, as it stands now. Decides nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from policies.facts import DeploymentFacts, Estimate, Facts, PairFacts, Transport
from router.bills import Tariff, tariffs
from router.call import Call
from router.conversations import Conversations, goes_on_from, identity, share
from router.demotion import Demotion
from router.deployments import Deployment, Kind
from router.estimates import Estimates
from router.features import CANNOT, needs, output_limit, prompt_tokens, turns_before_question
from router.health import Health
from router.settings import Settings
from router.telemetry import Metrics
from router.transports.cache import Fleet, Holder, Role, held
from workers.protocol import PairState

USUAL_OUTPUT = 256
"""Tokens expected of an answer where the caller sets no bound and nothing was learnt yet."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """What an entry of the configuration says, read once: a request reads slots, not the models people write."""

    deployment: Deployment
    id: str
    transport: Transport
    kind: Kind
    region: str | None
    cannot: frozenset[str]
    weight: float
    order: int
    tariff: Tariff
    free: bool
    """It costs nothing, whatever is asked of it."""
    plain: bool
    """No worker and no relay stands behind it: nothing about it has to be looked up."""

    @classmethod
    def of(cls, deployment: Deployment, tariff: Tariff) -> _Entry:
        return cls(
            deployment,
            deployment.id,
            deployment.transport,
            deployment.kind,
            deployment.model_info.region,
            CANNOT[deployment.kind],
            deployment.weight,
            deployment.order,
            tariff,
            tariff == Tariff(),
            deployment.kind in ("http", "litellm"),
        )


class Gatherer:
    """Reads the fleet, the estimates and the health of deployments; costs no I/O."""

    def __init__(
        self,
        settings: Settings,
        *,
        fleet: Fleet,
        estimates: Estimates,
        health: Health,
        metrics: Metrics,
        conversations: Conversations,
        demotion: Demotion,
        stopped: Callable[[], frozenset[str]],
    ) -> None:
        """`stopped` gives the stop buttons in force: `cache`, `pair:NAME`, `tenant:NAME`."""
        self._settings = settings
        self._fleet = fleet
        self._estimates = estimates
        self._health = health
        self._metrics = metrics
        self._conversations = conversations
        self._demotion = demotion
        self._stopped = stopped
        self._primed: dict[str, str] = {}
        self.tariffs = tariffs(settings)
        self._entries = {d.id: _Entry.of(d, self.tariffs[d.id]) for d in settings.model_list}
        self._cached = any(d.kind == "cache" for d in settings.model_list)
        self._strategy = settings.routing.strategy
        for deployment in settings.model_list:
            told = deployment.model_info.latency
            if told is not None and told.tokens_per_s is not None:
                estimates.prior(deployment.id, ttft_ms=told.ttft_ms, tokens_per_s=told.tokens_per_s)

    def facts(self, call: Call, deployments: tuple[Deployment, ...], model: str) -> Facts:
        """Facts of `call` if the group `model`, with these deployments, were to answer it. Raises BadRequest."""
        prompt = prompt_tokens(call)
        limit = output_limit(call)
        terms = call.tenant.policy.terms
        who = identity(call) if terms.sticky or terms.cache_share < 1 else None
        response = goes_on_from(call) if call.path.startswith("/responses") else None
        holder = None if response is None else self._conversations.last(response)
        cached = self._cached and any(d.kind == "cache" for d in deployments)
        return Facts(
            model=model,
            deployments=tuple([self._deployment(self._entry(d.id, call), prompt, limit) for d in deployments]),
            prompt_tokens=prompt,
            output_tokens=USUAL_OUTPUT if limit is None else limit,
            needs=needs(call),
            has_context=turns_before_question(call) if cached else True,
            hint=call.hint,
            budget_hint_ms=call.budget_ms,
            draw=random.random(),  # noqa: S311  (spreads load, guards nothing)
            now=time.time(),
            stopped=self._stopped(),
            pinned=call.pinned,
            strategy=self._strategy,
            last=holder or (None if who is None else self._conversations.last(who)),
            held=holder is not None,
            conversation=None if who is None else share(who),
            labels={**call.labels, "tenant": call.tenant.name},
            use_case=call.tenant.use_case,
            asked="" if call.model == model else call.model,
            open_ended=limit is None,
        )

    def _entry(self, id: str, call: Call) -> _Entry:
        """With the price of the model that is asked for, where it is a wildcard's."""
        entry = self._entries[id]
        if entry.tariff.by_model is None:
            return entry
        model = self._settings.routing.aliases.get(call.model, call.model)
        return _Entry.of(entry.deployment, entry.tariff.of(model))

    def _deployment(self, entry: _Entry, prompt: int, limit: int | None) -> DeploymentFacts:
        id = entry.id
        queue = self._metrics.in_flight(id)
        if entry.plain:
            return DeploymentFacts(
                id=id,
                transport=entry.transport,
                kind=entry.kind,
                region=entry.region,
                cannot=entry.cannot,
                estimate=self._estimate(entry, prompt, limit, queue),
                cooling=self._health.cooling(id),
                in_flight=queue,
                weight=entry.weight,
                order=entry.order,
            )
        holder = self._holder(entry.deployment)
        available, why = self._available(entry.deployment, holder)
        return DeploymentFacts(
            id=id,
            transport=entry.transport,
            kind=entry.kind,
            available=available,
            unavailable=why,
            region=entry.region,
            pair=self._pair(entry.deployment, holder),
            # What is not loaded has none yet: that nothing fits is not why it cannot answer.
            context=(holder.state.context or None) if holder is not None else None,
            cannot=entry.cannot,
            estimate=self._estimate(entry, prompt, limit, queue),
            cooling=self._health.cooling(id),
            in_flight=queue,
            weight=entry.weight,
            order=entry.order,
        )

    def _holder(self, deployment: Deployment) -> Holder | None:
        named = on_worker(deployment)
        if named is None:
            return None
        found = held(self._fleet, *named, self._demotion)
        if not found:
            return None
        self._prime(deployment.id, found[0], named[1])
        return found[0]

    def _available(self, deployment: Deployment, holder: Holder | None) -> tuple[bool, str]:
        if deployment.relay_params is not None:
            for group in (deployment.relay_params.sharer, deployment.relay_params.receiver):
                if not self._reachable(group):
                    return False, f"no deployment of {group} is available to the relay"
            return True, ""
        named = on_worker(deployment)
        if named is None:
            return True, ""
        if holder is None:
            return False, f"no live worker holds {named[0]} {named[1]}"
        return holder.state.ready, holder.state.reason

    def _reachable(self, group: str) -> bool:
        members = self._settings.groups.get(self._settings.group(group) or "", ())
        return any(self._available(d, self._holder(d))[0] for d in members if d.kind in ("http", "litellm", "local"))

    def _pair(self, deployment: Deployment, holder: Holder | None) -> PairFacts | None:
        if deployment.cache_params is None:
            return None
        name = deployment.cache_params.pair
        standing = self._demotion.standing(name)
        if holder is None or not isinstance(holder.state, PairState):
            return PairFacts(name, None, reason=f"no live worker holds pair {name}")
        state = holder.state
        return PairFacts(
            name,
            state.fingerprint if state.ready else None,
            state.mode,
            state.scope,
            state.verdict,
            state.gain,
            state.retention,
            state.reason,
            standing.why if standing.state == "demoted" else "",
            self._demotion.share(name) if standing.state == "probation" else None,
            state.signer,
        )

    def _estimate(self, entry: _Entry, prompt: int, limit: int | None, queue: int) -> Estimate | None:
        id, tariff = entry.id, entry.tariff
        output = expected_output(self._estimates.usual_output(id), limit)
        cost = 0.0 if entry.free else tariff.expected(prompt, output)
        estimate = self._estimates.predict(id, prompt_tokens=prompt, output_tokens=output, queue=queue, cost=cost)
        if estimate is None or not tariff.device_usd_s:
            return estimate
        # Waiting for others costs nothing: the device's time is what the answer would take alone.
        alone = estimate
        if queue:
            alone = self._estimates.predict(id, prompt_tokens=prompt, output_tokens=output) or estimate
        return replace(estimate, cost=tariff.expected(prompt, output, alone.total_p50 / 1000))

    def _prime(self, deployment: str, holder: Holder, name: str) -> None:
        """A worker's own rates stand until answers tell better; a restarted worker measured anew."""
        if self._primed.get(deployment) == holder.worker.epoch:
            return
        rates = holder.worker.rates.get(name)
        if rates is not None and rates.prefill_tokens_per_s > 0 and rates.decode_tokens_per_s > 0:
            self._primed[deployment] = holder.worker.epoch
            self._estimates.prior(
                deployment,
                prefill_tokens_per_s=rates.prefill_tokens_per_s,
                decode_tokens_per_s=rates.decode_tokens_per_s,
            )


def expected_output(usual: int | None, limit: int | None) -> int:
    """Tokens an answer is likely to have, within what the caller allows."""
    expected = USUAL_OUTPUT if usual is None else usual
    return expected if limit is None or limit > expected else limit


def on_worker(deployment: Deployment) -> tuple[Role, str] | None:
    """The pair or model of a worker that a deployment names."""
    if deployment.cache_params is not None:
        return "pair", deployment.cache_params.pair
    if deployment.local_params is not None:
        return "model", deployment.local_params.model
    return None
