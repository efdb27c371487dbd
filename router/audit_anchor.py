"""The anchor: signed heads of all chains, handed elsewhere again and again, by a thread of its own.

Whoever holds the signing key can rewrite a chain and its head, but not what was handed elsewhere before. The heads are
read from the disk, so several routers of one folder each anchor all of them. A line is one head: JSON with `v`, `ts`,
`tenant`, and the members of the head.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import structlog

from router.audit_keys import AuditError, chain_folder
from router.audit_lines import Anchored, Head, read_head
from router.audit_sinks import Sink, sink_of
from router.audit_verify import tenants
from router.settings import AuditConfig

log = structlog.get_logger(__name__)

VERSION = 1
_SOON = 1.0
"""Least seconds between two looks, however many records are written."""

_line = msgspec.json.Decoder(Anchored)


@dataclass(slots=True)
class _Place:
    """One sink and what it has."""

    name: str
    sink: Sink
    up: bool = False
    failed: bool = False
    known: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Chain and number of the last head it got, by tenant."""


class Anchor:
    """Hands heads to every sink, `every` so many seconds or `records`. `start` before use, `close` at the end."""

    def __init__(
        self,
        root: Path,
        sinks: Iterable[tuple[str, Sink]],
        *,
        every: float = 60.0,
        records: int = 1000,
        required: bool = False,
        max_lag: float = 300.0,
    ) -> None:
        """`sinks` by a name for metrics. `required`: `check` refuses when a record waits longer than `max_lag`."""
        self._root = root
        self._places = [_Place(name, sink) for name, sink in sinks]
        self._every, self._records = every, records
        self._required, self._max_lag = required, max_lag
        self._lock = threading.Condition()
        self._written = 0
        self._since: float | None = None
        """`time.monotonic()` of the oldest record that is not anchored everywhere."""
        self._ending = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._since = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="audit-anchor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hand over what has not been handed over; waits no longer than one attempt."""
        with self._lock:
            self._ending = True
            self._lock.notify()
        if self._thread is not None:
            self._thread.join()

    def wrote(self, records: int) -> None:
        """So many more records are durable here. For any thread."""
        with self._lock:
            self._written += records
            if self._since is None:
                self._since = time.monotonic()
            if self._written >= self._records:
                self._lock.notify()

    @property
    def lag(self) -> float:
        """Seconds that the oldest record has waited to be anchored everywhere; 0 where none waits."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def up(self) -> dict[str, bool]:
        """Of each sink, whether its last attempt succeeded; two of one name are one."""
        state: dict[str, bool] = {}
        for place in self._places:
            state[place.name] = state.get(place.name, True) and place.up
        return state

    @property
    def away(self) -> bool:
        """Some sink did not take what it was last given."""
        return any(place.failed for place in self._places)

    def check(self) -> None:
        """Raises AuditError where an anchor is required and has been out of reach for too long."""
        if self._required and self.lag > self._max_lag:
            raise AuditError(f"the anchor has been out of reach for {self.lag:.0f} s")

    def _run(self) -> None:
        ending = False
        while not ending:
            self._hand_over()
            with self._lock:
                # What was written meanwhile need not wait for the full time, but a busy router anchors once a second.
                self._lock.wait_for(lambda: self._ending, min(_SOON, self._every))
                self._lock.wait_for(lambda: self._ending or self._written >= self._records, self._every - _SOON)
                ending = self._ending
        self._hand_over()

    def _hand_over(self) -> None:
        with self._lock:
            since, self._since, self._written = self._since, None, 0
        try:
            heads = self._heads()
        except (OSError, AuditError) as error:
            log.error("audit_anchor_failed", to="", error=str(error))
            heads = None
        given = [heads is not None and self._give(place, heads) for place in self._places]
        if not all(given):
            with self._lock:
                self._since = since if since is not None else self._since

    def _heads(self) -> dict[str, Head]:
        found = {tenant: read_head(chain_folder(self._root, tenant)) for tenant in tenants(self._root)}
        return {tenant: head for tenant, head in found.items() if head is not None and head.seq >= 0}

    def _give(self, place: _Place, heads: dict[str, Head]) -> bool:
        changed = {t: head for t, head in heads.items() if place.known.get(t) != (head.chain, head.seq)}
        moment = datetime.now(UTC).isoformat(timespec="milliseconds")
        lines = [msgspec.json.encode(anchored(tenant, head, moment)) for tenant, head in changed.items()]
        try:
            if lines:
                place.sink.write(lines)
        except OSError as error:
            if not place.failed:
                log.error("audit_anchor_failed", to=place.name, error=str(error))
            place.up, place.failed = False, True
            return False
        place.up, place.failed = True, False
        place.known |= {tenant: (head.chain, head.seq) for tenant, head in changed.items()}
        return True


def anchor_of(config: AuditConfig) -> Anchor | None:
    """The anchor that a configuration asks for."""
    written = config.anchor
    if written is None:
        return None
    sinks = [
        (urlsplit(url).scheme or "file", sink_of(url, authorization=written.authorization, lock_days=written.lock_days))
        for url in written.to
    ]
    return Anchor(
        config.dir,
        sinks,
        every=written.every,
        records=written.records,
        required=written.required,
        max_lag=written.max_lag,
    )


def anchored(tenant: str, head: Head, moment: str) -> Anchored:
    return Anchored(VERSION, moment, tenant, head.chain, head.seq, head.hash, head.key, head.sig)


def read_anchor(path: Path) -> list[Anchored]:
    """Heads that were kept elsewhere: one file, or all files of a folder in the order of their names.

    What stands before the JSON of a line (a syslog server's own head) is passed over, and so are lines without one.
    Raises AuditError for a line that begins like a head and is none, and where there is not a single head.
    """
    found: list[Anchored] = []
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        for number, line in enumerate(file.read_bytes().splitlines(), start=1):
            at = line.find(b'{"v":')
            if at >= 0:
                try:
                    found.append(_line.decode(line[at:].strip()))
                except msgspec.MsgspecError as error:
                    raise AuditError(f"{file} line {number}: not an anchored head ({error})") from error
    if not found:
        raise AuditError(f"{path}: holds no anchored head")
    return found


def missing_chains(known: Sequence[str], lines: Sequence[Anchored]) -> list[str]:
    """Tenants that were anchored, and of whom this log knows nothing."""
    return sorted({line.tenant for line in lines} - set(known))
