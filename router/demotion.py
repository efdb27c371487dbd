"""Demotion: takes a pair out when its answers go wrong, and lets it back by probation. No I/O.

What is observed of a pair's answers goes into one `Alarm` per signal; an alarm, or a fingerprint that is not the one
accepted before, demotes the pair: policy then refuses it (`pair_demoted`) and requests take the text lane. After a rest
it is on probation: a share of the requests may take it (`pair_probation` refuses the others). So many answers without
an alarm bring it back; an alarm meanwhile, of a tenth of the patience, ends in a rest twice as long.

Each process watches what passes through it. Standings are shared: `changed` tells whoever keeps and spreads them, and
`take` puts in force what another process found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from router.alarms import Alarm
from workers.config import DemotionLimits

LONGEST_REST_S = 86400.0
_STEADY_S = 86400.0
"""A pair that was active for so long begins again with the shortest rest."""
_ON_PROBATION = 10.0
"""So much less patience while a pair is on probation."""
_RECENT = 0.05
"""Weight of the newest F1 in the mean that is shown."""

Signal = Literal["agreement", "harm", "drift", "errors"]
SIGNALS: tuple[Signal, ...] = ("agreement", "harm", "drift", "errors")
State = Literal["active", "demoted", "probation"]


class Standing(msgspec.Struct, frozen=True):
    """Where a pair stands. Of two of one pair the one with the higher `seq` counts."""

    state: State = "active"
    seq: int = 0
    """Microseconds, about; always above the standing that it replaces."""
    why: str = ""
    """The signal that rang, `fingerprint`, or a person's reason; empty while nothing ever happened."""
    since: float = 0.0
    """Unix seconds."""
    until: float = 0.0
    """End of the rest."""
    round: int = 0
    """Demotions in a row."""
    fingerprint: str = ""
    """The pair that this is about: another one under the same name is a swap."""


ACTIVE = Standing()


@dataclass(frozen=True, slots=True)
class Step:
    """A standing that another one replaced, for the record."""

    pair: str
    old: Standing
    new: Standing
    detail: Mapping[str, Any] = field(default_factory=dict)
    who: str = "router"

    @property
    def what(self) -> str:
        """Name of the control record."""
        return {"active": "pair_reinstated", "demoted": "pair_demoted", "probation": "pair_probation"}[self.new.state]


class _Watch:
    """What this process sees of one pair."""

    def __init__(self, limits: DemotionLimits) -> None:
        self.limits = limits
        self.alarms = _alarms(limits)
        self.passed = 0
        """Answers without an alarm since probation began."""
        self.agreed = 0
        self.compared = 0
        self.f1: float | None = None

    def begin(self, patience: float) -> None:
        """Nothing was seen yet."""
        self.passed = 0
        for alarm in self.alarms.values():
            alarm.reset(patience)


class Demotion:
    """Standings of all configured pairs. Call from one thread; `observe_*` cost a microsecond.

    Observations of a pair that is not configured are left aside.
    """

    def __init__(
        self,
        limits: Mapping[str, DemotionLimits],
        *,
        changed: Callable[[Step], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`changed` is told of every step that this process made, once it is in force."""
        self._changed = changed
        self._clock = clock
        self._watches: dict[str, _Watch] = {}
        self._standings: dict[str, Standing] = {}
        self.configure(limits)

    def configure(self, limits: Mapping[str, DemotionLimits]) -> None:
        """Take in a (re)loaded configuration. Standings stay; a pair whose limits changed is watched anew."""
        old = self._watches
        self._watches = {
            name: old[name] if name in old and old[name].limits == found else _Watch(found)
            for name, found in limits.items()
        }

    # -- what was seen

    def observe_agreement(self, pair: str, agreed: bool, f1: float) -> None:
        """An answer was compared with the text route's: whether they say the same, and their token F1."""
        watch = self._watches.get(pair)
        if watch is not None:
            watch.compared += 1
            watch.agreed += agreed
            watch.f1 = f1 if watch.f1 is None else watch.f1 + _RECENT * (f1 - watch.f1)
            self._see(pair, watch, "agreement", 1.0 - min(max(f1, 0.0), 1.0))

    def observe_harm(self, pair: str, harmed: bool) -> None:
        """An answer was judged: it is wrong where the text route's is right."""
        if (watch := self._watches.get(pair)) is not None:
            self._see(pair, watch, "harm", float(harmed))

    def observe_drift(self, pair: str, deviation: float) -> None:
        """How much worse one answer was than the pair's report promises, on [-1, 1]: promised F1 less the answer's."""
        if (watch := self._watches.get(pair)) is not None:
            self._see(pair, watch, "drift", min(max(deviation, -1.0), 1.0))

    def observe_error(self, pair: str, failed: bool) -> None:
        """A request to the pair ended: it failed, or it was answered. Each answer counts towards probation's end."""
        watch = self._watches.get(pair)
        if watch is None:
            return
        self._see(pair, watch, "errors", float(failed))
        if not failed and self.standing(pair).state == "probation":
            watch.passed += 1
            if watch.passed >= watch.limits.probation.samples:
                self._step(pair, "active", "probation passed", {"answers": watch.passed})

    def observe_fingerprint(self, pair: str, fingerprint: str, verdict: str) -> Standing:
        """A live worker holds the pair with this fingerprint; its standing now.

        The first one is accepted. Another one demotes the pair; where a report of its own says `verified` it need not
        rest before probation.
        """
        standing = self.standing(pair)
        if standing.fingerprint == fingerprint or pair not in self._watches or not fingerprint:
            return standing
        if not standing.fingerprint:
            self._set(pair, replace(standing, seq=self._seq(standing), fingerprint=fingerprint), {})
        else:
            detail = {"before": standing.fingerprint, "now": fingerprint, "verdict": verdict}
            state: State = "probation" if verdict == "verified" else "demoted"
            self._step(pair, state, "fingerprint", detail, fingerprint=fingerprint)
        return self.standing(pair)

    def _see(self, pair: str, watch: _Watch, signal: Signal, value: float) -> None:
        alarm = watch.alarms.get(signal)
        # A pair at rest may still end what it had begun: that is no news.
        if alarm is not None and alarm.see(value) and self.standing(pair).state != "demoted":
            self._step(pair, "demoted", signal, {"limit": alarm.limit, "samples": alarm.samples})

    # -- where it stands

    def standing(self, pair: str) -> Standing:
        """As it is now; a rest that is over has become probation."""
        standing = self._standings.get(pair, ACTIVE)
        if standing.state == "demoted" and self._clock() >= standing.until:
            self._step(pair, "probation", standing.why, {})
            standing = self._standings[pair]
        return standing

    def share(self, pair: str) -> float:
        """Of the requests that could take the pair, so many may while it is on probation."""
        watch = self._watches.get(pair)
        return 0.0 if watch is None else watch.limits.probation.share

    def wants_twin(self, pair: str) -> bool:
        """Whether every answer should be compared with the text route's, whatever was asked for: on probation."""
        return self.standing(pair).state == "probation"

    def reinstate(self, pair: str, who: str, reason: str) -> Standing:
        """A person puts the pair back in force as it is. Raises KeyError for one that is not configured."""
        if pair not in self._watches:
            raise KeyError(pair)
        self._step(pair, "active", reason, {}, who=who, round=0)
        return self.standing(pair)

    def take(self, pair: str, standing: Standing) -> bool:
        """Put in force what another process, or an earlier run, found; False where it is old news."""
        known = self._standings.get(pair, ACTIVE)
        if standing.seq <= known.seq:
            return False
        self._standings[pair] = standing
        if standing.state != known.state and pair in self._watches:
            self._begin(pair, standing.state)
        return True

    def known(self) -> dict[str, Standing]:
        """All that is to be kept."""
        return dict(self._standings)

    # -- steps

    def _step(
        self,
        pair: str,
        state: State,
        why: str,
        detail: Mapping[str, Any],
        *,
        who: str = "router",
        fingerprint: str | None = None,
        round: int | None = None,
    ) -> None:
        old, now = self._standings.get(pair, ACTIVE), self._clock()
        rounds = old.round if round is None else round
        until = 0.0
        if state == "demoted":
            steady = old.state == "active" and now - old.since > _STEADY_S
            rounds = 1 if steady else rounds + 1
            rest = self._watches[pair].limits.rest if pair in self._watches else DemotionLimits().rest
            until = now + min(rest * 2.0 ** (rounds - 1), LONGEST_REST_S)
        new = Standing(
            state=state,
            seq=self._seq(old),
            why=why,
            since=now,
            until=until,
            round=rounds,
            fingerprint=old.fingerprint if fingerprint is None else fingerprint,
        )
        self._set(pair, new, detail, who)
        self._begin(pair, state)

    def _set(self, pair: str, new: Standing, detail: Mapping[str, Any], who: str = "router") -> None:
        old = self._standings.get(pair, ACTIVE)
        self._standings[pair] = new
        self._changed(Step(pair, old, new, detail, who))

    def _begin(self, pair: str, state: State) -> None:
        if pair in self._watches:
            watch = self._watches[pair]
            watch.begin(watch.limits.patience / (_ON_PROBATION if state == "probation" else 1))

    def _seq(self, old: Standing) -> int:
        return max(int(self._clock() * 1e6), old.seq + 1)

    # -- seen from outside

    def states(self) -> list[tuple[str, Standing]]:
        """Every configured pair."""
        return [(pair, self.standing(pair)) for pair in self._watches]

    def samples(self, state: State) -> Iterable[tuple[dict[str, str], float]]:
        """For metrics: 1 for each pair in this state, else 0."""
        return [({"pair": pair}, float(standing.state == state)) for pair, standing in self.states()]

    def levels(self) -> Iterable[tuple[dict[str, str], float]]:
        """For metrics: how near each alarm is, 0 to 1."""
        return [
            ({"pair": pair, "signal": signal}, alarm.level)
            for pair, watch in self._watches.items()
            for signal, alarm in watch.alarms.items()
        ]

    def agreement(self) -> Iterable[tuple[dict[str, str], float]]:
        """For metrics: recent mean F1 of each pair that was compared."""
        return [({"pair": pair}, watch.f1) for pair, watch in self._watches.items() if watch.f1 is not None]

    def agreed(self) -> Iterable[tuple[dict[str, str], float]]:
        """For metrics: share of compared answers that said the same, since the start."""
        return [({"pair": p}, w.agreed / w.compared) for p, w in self._watches.items() if w.compared]


def _alarms(limits: DemotionLimits) -> dict[Signal, Alarm]:
    alarms: dict[Signal, Alarm] = {}
    if limits.min_agreement is not None:
        alarms["agreement"] = Alarm.of_mean(1 - limits.min_agreement, limits.patience)
    if limits.max_harm is not None:
        alarms["harm"] = Alarm.of_share(limits.max_harm, limits.patience)
    if limits.max_drift is not None:
        alarms["drift"] = Alarm.of_mean(limits.max_drift, limits.patience, low=-1.0)
    if limits.max_errors is not None:
        alarms["errors"] = Alarm.of_share(limits.max_errors, limits.patience)
    return alarms
