"""The cache lane as a whole: what must not run now, what runs, and what its answers say about the pairs.

Policy judges a request before it runs; between that and a call to a worker lie retries, waits and fallbacks. So the
lane asks again right before each call: a stop that came meanwhile holds too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from router.call import Call
from router.demotion import Demotion
from router.deployments import Deployment
from router.errors import TransportError, Unavailable
from router.health import blames
from router.stops import Stops
from router.transports.cache import Fleet, held, holders
from workers.protocol import PairState


class RunningCall(msgspec.Struct, frozen=True):
    """A call that a pair answers now."""

    id: str
    tenant: str
    pair: str
    deployment: str
    started: float
    """`time.perf_counter` of this router."""


@dataclass(frozen=True, slots=True)
class CacheLane:
    """`pairs`: name of the pair by cache-lane deployment; replaced on a reload, `running` goes on."""

    pairs: Mapping[str, str]
    stops: Stops
    demotion: Demotion
    running: dict[str, RunningCall]

    def enter(self, call: Call, deployment: str) -> None:
        """Right before a worker is called. Raises Unavailable where a stop or a demotion came after the decision."""
        pair = self.pairs.get(deployment)
        if pair is None:
            return
        if self.stops.holds(pair, call.tenant.name):
            raise Unavailable("The cache lane was stopped meanwhile.", code="stopped")
        if self.demotion.standing(pair).state == "demoted":
            raise Unavailable(f"The pair {pair!r} was demoted meanwhile.", code="pair_demoted")
        self.running[call.id] = RunningCall(call.id, call.tenant.name, pair, deployment, call.started)

    def failed(self, call: Call, deployment: str, error: TransportError) -> None:
        """The call led to nothing."""
        if deployment in self.pairs:
            self.running.pop(call.id, None)
            if blames(error):
                self.demotion.observe_error(self.pairs[deployment], True)

    def left(self, call: Call, deployment: str | None, outcome: str) -> None:
        """The call is over, however it ended; None answered where `deployment` is."""
        self.running.pop(call.id, None)
        pair = self.pairs.get(deployment or "")
        if pair is not None and outcome in ("ok", "cut"):
            self.demotion.observe_error(pair, outcome == "cut")


def lane_pairs(deployments: tuple[Deployment, ...]) -> dict[str, str]:
    """The pair behind each cache-lane deployment."""
    return {d.id: d.cache_params.pair for d in deployments if d.cache_params is not None}


def watch_fingerprints(fleet: Fleet, demotion: Demotion) -> None:
    """Look at what live workers hold, so that a swap is seen without traffic too."""
    for name, _ in demotion.states():
        held(fleet, "pair", name, demotion)


def reported(fleet: Fleet, pair: str) -> list[dict[str, Any]]:
    """What live workers tell of the pair's report: one entry, unless they tell different things; or none."""
    told: list[dict[str, Any]] = []
    for holder in holders(fleet, "pair", pair):
        state = holder.state
        if state.ready and isinstance(state, PairState):
            entry = {
                "fingerprint": state.fingerprint,
                "signer": state.signer,
                "verdict": state.verdict,
                "gain": state.gain,
                "retention": state.retention,
            }
            if entry not in told:
                told.append(entry)
    return sorted(told, key=str)
