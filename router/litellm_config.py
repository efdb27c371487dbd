"""LiteLLM's config.yaml, accepted as it is: what of a file works here, what does not, and what stops the start."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from router.guardrail_config import foreign
from router.litellm_keys import TABLE as TABLE
from router.litellm_keys import Class, Row
from router.source import Path_, Source, dotted


@dataclass(frozen=True, slots=True)
class Finding:
    """One key of a given file that does not do here what it does in LiteLLM."""

    key: str
    """Dotted path."""
    line: int
    kind: Class
    reason: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.key} does not do here what it does in LiteLLM: {self.reason}"


_BY_KEY = {(row.scope, row.key): row for row in TABLE}
_SECTIONS = ("router_settings", "litellm_settings", "general_settings")
_OURS = frozenset(
    {
        "models",
        "pairs",
        "workers",
        "redis",
        "store",
        "prices",
        "tenants",
        "accept_unsupported",
        "admins",
        "stops",
        "otel",
        "server",
        "log",
        "audit",
        "state_dir",
    }
)
"""Top-level keys that LiteLLM does not have."""
_NEAR = tuple(row.key for row in TABLE if row.scope == "litellm_params" and row.kind == "works")
_PRICE = re.compile(r"(?:^|_)costs?(?:_|$)")
"""LiteLLM's names of prices, by size, tier and bound, of which there are a hundred: none is the model's to read."""
_ENFORCED = "enforce_model_rate_limits"
_VALUES = {
    ("routing_strategy", "usage-based-routing"): "tokens per minute are not compared; calls in flight are",
    ("routing_strategy", "usage-based-routing-v2"): "tokens per minute are not compared; calls in flight are",
}


def unsupported(written: Source) -> list[Finding]:
    """Every key that does not work here, of class `named` or `refused`; one whose value is off or empty is none.

    Raises ConfigError for a key that neither LiteLLM nor we know.
    """
    accepted = _accepted(written.data)
    return [
        Finding(dotted(path), written.line(path), row.kind, row.reason)
        for scope, path, value in _keys(written.data)
        if (row := _row(written, scope, path, value, accepted)).kind != "works" and value
    ] + [Finding(dotted(path), written.line(path), "refused", reason) for path, reason in _foreign(written.data)]


def refuse(written: Source) -> None:
    """Raises ConfigError for the first key that protects and is not accepted by name."""
    accepted = _accepted(written.data)
    for scope, path, value in _keys(written.data):
        row = _BY_KEY.get((scope, str(path[-1])))
        if row is not None and row.kind == "refused" and value and not accepted & _names(scope, path):
            name = ".".join(filter(None, (scope, row.key)))
            problem = f"{row.reason}; not supported yet. To start all the same: accept_unsupported: [{name}]"
            raise written.error(path, problem)
    for path, reason in _foreign(written.data):
        if "guardrails" not in accepted:
            raise written.error(path, f"{reason}. To start without it: accept_unsupported: [guardrails]")


def supported(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data without keys that have no effect and sections left empty.

    LiteLLM's Redis keys become `redis.url`, its `json_logs` becomes `log.format`, where ours are not written.
    """
    dropped = {path for scope, path, _ in _keys(data) if not _kept(scope, str(path[-1]))}
    dropped |= {path for path, _ in _foreign(data)}
    kept: dict[str, Any] = _without(data, dropped, ())
    kept = {key: value for key, value in kept.items() if value is not None}
    url = redis_url(kept.get("router_settings"))
    if url is not None and "redis" not in kept:
        kept["redis"] = {"url": url}
    shared = kept.get("litellm_settings")
    if isinstance(shared, Mapping) and shared.get("json_logs") is True and "log" not in kept:
        kept["log"] = {"format": "json"}
    return kept


def redis_url(router_settings: object) -> str | None:
    """`redis_url`, or one made of `redis_host`, `redis_port`, `redis_password` and `redis_db`."""
    if not isinstance(router_settings, Mapping):
        return None
    if url := router_settings.get("redis_url"):
        return str(url)
    host = router_settings.get("redis_host")
    if not host:
        return None
    password = router_settings.get("redis_password")
    login = f":{quote(str(password), safe='')}@" if password else ""
    return f"redis://{login}{host}:{router_settings.get('redis_port') or 6379}/{router_settings.get('redis_db') or 0}"


def _keys(data: Mapping[str, Any]) -> Iterator[tuple[str, Path_, Any]]:
    """(scope, path, value) of every key that the table speaks of. What has the wrong shape is left to validation."""
    for key, value in data.items():
        yield "", (key,), value
    for section in _SECTIONS:
        if isinstance(data.get(section), Mapping):
            yield from ((section, (section, key), value) for key, value in data[section].items())
    entries = data.get("model_list")
    for index, entry in enumerate(entries if isinstance(entries, list) else ()):
        for scope in ("litellm_params", "model_info"):
            if isinstance(entry, Mapping) and isinstance(entry.get(scope), Mapping):
                yield from ((scope, ("model_list", index, scope, k), v) for k, v in entry[scope].items())


def _row(written: Source, scope: str, path: Path_, value: Any, accepted: frozenset[str]) -> Row:
    key = str(path[-1])
    if isinstance(value, str) and (key, value) in _VALUES:
        return Row(scope, key, "named", _VALUES[key, value])
    if key == "optional_pre_call_checks" and isinstance(value, list) and set(map(str, value)) - {_ENFORCED}:
        return Row(scope, key, "named", f"of these only {_ENFORCED} has an effect")
    if (row := _BY_KEY.get((scope, key))) is not None:
        return row
    if scope == "litellm_params":
        if _PRICE.search(key):
            return Row(scope, key, "named", "this price is not billed here")
        near = difflib.get_close_matches(key, _NEAR, 1, cutoff=0.8)
        if near:
            return Row(scope, key, "named", f"it is sent to the model as a request default; did you mean {near[0]}?")
        return Row(scope, key, "works")
    if scope == "model_info" or (not scope and key in _OURS):
        return Row(scope, key, "works")
    if accepted & _names(scope, path):
        return Row(scope, key, "named", "nobody knows this key; accept_unsupported lists it")
    known = [row.key for row in TABLE if row.scope == scope] + ([] if scope else sorted(_OURS))
    near = difflib.get_close_matches(key, known, 1)
    raise written.error(path, f"unknown key {key!r}" + (f"; did you mean {near[0]}?" if near else ""))


def _kept(scope: str, key: str) -> bool:
    row = _BY_KEY.get((scope, key))
    if row is None:
        if scope == "litellm_params" and _PRICE.search(key):
            return False
        return scope in ("litellm_params", "model_info") or (not scope and key in _OURS)
    return row.kind == "works" or scope == "model_info"


def _without(value: Any, dropped: set[Path_], path: Path_) -> Any:
    if isinstance(value, Mapping):
        return {k: _without(v, dropped, (*path, k)) for k, v in value.items() if (*path, k) not in dropped}
    if isinstance(value, list):
        return [_without(v, dropped, (*path, i)) for i, v in enumerate(value) if (*path, i) not in dropped]
    return value


def _foreign(data: Mapping[str, Any]) -> Iterator[tuple[Path_, str]]:
    """Guardrails that LiteLLM would run and we do not, each with the reason."""
    entries = data.get("guardrails")
    for index, entry in enumerate(entries if isinstance(entries, list) else ()):
        if (reason := foreign(entry)) is not None:
            yield ("guardrails", index), reason


def _accepted(data: Mapping[str, Any]) -> frozenset[str]:
    listed = data.get("accept_unsupported")
    return frozenset(str(name) for name in listed) if isinstance(listed, list) else frozenset()


def _names(scope: str, path: Path_) -> frozenset[str]:
    key = str(path[-1])
    return frozenset((key, f"{scope}.{key}", dotted(path)))
