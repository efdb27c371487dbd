"""LiteLLM's fallbacks between model groups: which group comes next after which failure."""

from __future__ import annotations

from collections.abc import Mapping

from router.errors import Refused, RouterError, TransportError
from router.settings import Routing
from router.transports.upstream_errors import CONTENT_CODES, CONTEXT_CODES


def after(routing: Routing, group: str, error: RouterError, asked: str | None = None) -> tuple[str, ...]:
    """Groups to try when `group` failed with `error`; none where no other model can mend it.

    `asked`: the name that the caller knows the group by, an alias or one that fits a wildcard. What is written for
    that name goes before what is written for the group.
    """
    if error.code in CONTEXT_CODES:
        found = _of(routing.context_window_fallbacks, group, asked)
    elif error.code in CONTENT_CODES:
        found = _of(routing.content_policy_fallbacks, group, asked)
    else:
        found = ()
    return found or _unless_refused(routing, group, error, asked)


def _unless_refused(routing: Routing, group: str, error: RouterError, asked: str | None) -> tuple[str, ...]:
    if isinstance(error, Refused) or not isinstance(error, TransportError):
        return ()
    return others(routing, group, asked)


def others(routing: Routing, group: str, asked: str | None = None) -> tuple[str, ...]:
    """Groups that may answer when every deployment of `group` fails."""
    return _of(routing.fallbacks, group, asked) or routing.default_fallbacks


def _of(table: Mapping[str, tuple[str, ...]], group: str, asked: str | None) -> tuple[str, ...]:
    return (asked is not None and table.get(asked)) or table.get(group) or table.get("*") or ()
