"""Bills: what an answer is expected to cost, and what it did: tokens by price, a local model's device by the hour."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import msgspec

from policies.facts import Facts
from router.asked import asked, searches
from router.call import Call, Reply
from router.deployments import Deployment
from router.prices import FREE, Asked, Price
from router.settings import Settings


@dataclass(frozen=True, slots=True)
class Tariff:
    """What a deployment charges. Of a relay the most that its halves may: which deployments they take shows later."""

    price: Price = FREE
    device_usd_s: float = 0.0
    """USD per second of the device that a local model, or both models of a pair, run on."""
    flat: float = 0.0
    """USD per request: a relay's hint."""
    by_model: Callable[[str], Price] | None = field(default=None, compare=False)
    """Of a wildcard: prices by the model that is asked for."""
    dear: bool = field(init=False)
    """See `Price.dear`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dear", self.price.dear)

    def of(self, model: str) -> Tariff:
        """For one model; of a wildcard that model's own."""
        return self if self.by_model is None else replace(self, price=self.by_model(model), by_model=None)

    def reserve(self, asked: Asked) -> float:
        """USD that an answer may cost where its price counts more than plain tokens."""
        return self.price.reserve(asked) + self.flat

    def expected(self, prompt_tokens: int, output_tokens: int, seconds: float = 0.0) -> float:
        """USD for so many tokens, and seconds of the device."""
        return self.price.of(prompt_tokens, output_tokens) + self.flat + seconds * self.device_usd_s

    def bill(self, reply: Reply, waited: float) -> float | None:
        """USD for an answer that has ended; None where it did not tell enough.

        `waited`: seconds for the device where the worker could not tell them.
        """
        charged = self.price.bill(reply.usage)
        if not self.device_usd_s or charged is None:
            return charged
        return charged + self.device_usd_s * (waited if reply.run is None else _device_s(reply.run))


class _Run(msgspec.Struct):
    """What a bill reads of `workers.protocol.Run`."""

    device_ms: float = 0.0


_run = msgspec.json.Decoder(_Run)


def _device_s(run: msgspec.Raw) -> float:
    return _run.decode(run).device_ms / 1000


def tariffs(settings: Settings) -> dict[str, Tariff]:
    """By deployment id."""
    plain = {
        d.id: Tariff(d.price, _device_usd_s(settings, d), by_model=d.price_of if d.wild else None)
        for d in settings.model_list
    }
    return {d.id: _relayed(settings, d, plain) if d.relay_params else plain[d.id] for d in settings.model_list}


def reserved(call: Call, facts: Facts, id: str, tariff: Tariff) -> float:
    """USD to reserve for an answer of a deployment: what is expected, and no less than what was asked for may cost.

    Of one answer in plain tokens the length is what such answers usually have, within what the caller allows.
    """
    estimate = next((d.estimate for d in facts.deployments if d.id == id), None)
    usual = tariff.expected(facts.prompt_tokens, facts.output_tokens) if estimate is None else estimate.cost
    if tariff.price.fees:
        usual += tariff.price.fee(searches(call))
    plain = call.raw is None and not tariff.dear and "service_tier" not in call.fields
    if plain and "n" not in facts.needs and "completions" not in facts.needs:
        return usual
    return max(usual, tariff.reserve(asked(call, facts)))


def _device_usd_s(settings: Settings, deployment: Deployment) -> float:
    """As the deployment says, else the dearest worker that the configuration has for it."""
    params = deployment.cache_params or deployment.local_params
    if params is None:
        return 0.0
    if params.device_hour_usd is not None:
        return params.device_hour_usd / 3600
    name = deployment.upstream_model
    workers = [w for w in settings.workers if name in (w.pairs if deployment.cache_params else w.models)]
    return max((w.device_hour_usd or 0.0 for w in workers), default=0.0) / 3600


def _relayed(settings: Settings, relay: Deployment, plain: dict[str, Tariff]) -> Tariff:
    params = relay.relay_params
    assert params is not None  # noqa: S101  (asked for relays only)
    sharer, receiver = (_dearest(settings, group, plain) for group in (params.sharer, params.receiver))
    hint = params.max_hint_tokens
    price = Price(sharer.price.prompt + receiver.price.prompt, receiver.price.completion)
    flat = hint * (sharer.price.completion + receiver.price.prompt) + sharer.flat + receiver.flat
    return Tariff(price, max(sharer.device_usd_s, receiver.device_usd_s), flat)


def _dearest(settings: Settings, group: str, plain: dict[str, Tariff]) -> Tariff:
    members = settings.groups.get(settings.group(group) or "", ())
    name = settings.routing.aliases.get(group, group)  # a wildcard is asked for the model that the relay names
    found = [plain[d.id].of(name) for d in members if d.kind not in ("relay", "cache")]

    def most(values: Iterable[float]) -> float:
        return max(values, default=0.0)

    price = Price(most(t.price.prompt for t in found), most(t.price.completion for t in found))
    return Tariff(price, most(t.device_usd_s for t in found), most(t.price.fee({}) for t in found))
