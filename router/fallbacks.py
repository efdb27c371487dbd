"""LiteLLM's fallbacks between model groups: which group comes next after which failure."""

from __future__ import annotations

from collections.abc import Mapping

from router.errors import Refused, RouterError, TransportError
from router.settings import Routing
from router.transports.upstream_errors import CONTENT_CODES, CONTEXT_EXCEEDED

_CONTEXT = frozenset({CONTEXT_EXCEEDED, "context_too_long"})


def after(routing: Routing, group: str, error: RouterError) -> tuple[str, ...]:
    """Groups to try when `group` failed with `error`; none where no other model can mend it."""
    if error.code in _CONTEXT:
        return _of(routing.context_window_fallbacks, group) or _unless_refused(routing, group, error)
    if error.code in CONTENT_CODES:
        return _of(routing.content_policy_fallbacks, group) or _unless_refused(routing, group, error)
    return _unless_refused(routing, group, error)


def _unless_refused(routing: Routing, group: str, error: RouterError) -> tuple[str, ...]:
    if isinstance(error, Refused) or not isinstance(error, TransportError):
        return ()
    return others(routing, group)


def others(routing: Routing, group: str) -> tuple[str, ...]:
    """Groups that may answer when every deployment of `group` fails."""
    return _of(routing.fallbacks, group) or routing.default_fallbacks


def _of(table: Mapping[str, tuple[str, ...]], group: str) -> tuple[str, ...]:
    return table.get(group) or table.get("*") or ()
