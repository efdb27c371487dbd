"""The OpenAPI page: every route that is served, what it takes and what it answers. Written once, at load.

Bodies of models are described as far as the router reads them; what else a provider takes passes untouched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from router.admins import RIGHTS
from router.passthrough import BELOW, FAMILIES, METHODS

Key = Literal["none", "tenant", "admin"]
_TEXT: dict[str, Any] = {"type": "string"}
_ANY: dict[str, Any] = {"type": "object"}
_LIST: dict[str, Any] = {
    "type": "object",
    "required": ["object", "data"],
    "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": {"type": "object"}}},
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    summary: str
    key: Key = "tenant"
    body: dict[str, Any] | None = None
    kinds: tuple[str, ...] = ("application/json",)
    """Content types of the answer."""
    answer: dict[str, Any] = field(default_factory=lambda: _ANY)
    headers: tuple[tuple[str, dict[str, Any]], ...] = ()
    any_body: bool = False
    """A body of any kind, or none."""


def _object(required: tuple[str, ...], **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties}


def _texts(**more: Any) -> dict[str, Any]:
    return {"oneOf": [_TEXT, {"type": "array", "items": _TEXT}], **more}


_MODEL: dict[str, Any] = {**_TEXT, "minLength": 1, "description": "A model group."}
_MESSAGE = _object(("role",), role=_TEXT, content={"type": ["string", "array", "null"], "items": {"type": "object"}})
_ASKED: dict[str, Any] = {
    "model": _MODEL,
    "stream": {"type": ["boolean", "null"]},
    "stream_options": {"type": ["object", "null"], "properties": {"include_usage": {"type": ["boolean", "null"]}}},
    "guardrails": {"type": ["array", "null"], "items": _TEXT},
}
_CHAT = _object(
    ("model", "messages"),
    **_ASKED,
    messages={"type": "array", "minItems": 1, "items": _MESSAGE},
    max_tokens={"type": ["integer", "null"]},
    max_completion_tokens={"type": ["integer", "null"]},
    tools={"type": ["array", "null"], "items": {"type": "object"}},
)
_NARROWING: tuple[tuple[str, dict[str, Any]], ...] = (
    ("x-twolane-transport", {"enum": ["text", "cache", "auto"]}),
    ("x-twolane-latency-budget-ms", {"type": "number", "exclusiveMinimum": 0}),
    ("x-twolane-deployment", _TEXT),
    ("x-twolane-labels", _TEXT),
    ("x-session-id", _TEXT),
)
_STREAMS = ("application/json", "text/event-stream")
_WHY = _object(("reason",), reason=_TEXT, by=_TEXT, drill={"type": "boolean"})
_TARGET: dict[str, Any] = {**_TEXT, "pattern": "^(cache|pair:.+|tenant:.+)$"}
_STOP = _object(("target", "reason"), **_WHY["properties"], target=_TARGET)

_OPEN = (
    Operation("GET", "/health/liveliness", "Whether the process serves.", "none", answer=_TEXT),
    Operation("GET", "/health/liveness", "The same.", "none", answer=_TEXT),
    Operation("GET", "/health/readiness", "Whether its workers have loaded, and Redis answers.", "none"),
    Operation("GET", "/metrics", "Prometheus metrics.", "none", kinds=("text/plain",), answer=_TEXT),
    Operation("GET", "/openapi.json", "This page.", "none"),
    Operation("GET", "/", "The dashboard.", "none", kinds=("text/html",), answer=_TEXT),
)
_DOORS = (
    Operation("POST", "/chat/completions", "Answer a conversation.", body=_CHAT, kinds=_STREAMS, headers=_NARROWING),
    Operation(
        "POST",
        "/completions",
        "Go on with a text.",
        body=_object(("model", "prompt"), **_ASKED, prompt=_texts()),
        kinds=_STREAMS,
        headers=_NARROWING,
    ),
    Operation(
        "POST",
        "/embeddings",
        "Texts as vectors.",
        body=_object(("model", "input"), model=_MODEL, input=_texts()),
        headers=_NARROWING,
    ),
    Operation(
        "POST",
        "/responses",
        "Answer, by OpenAI's newer interface.",
        body=_object(("model", "input"), **_ASKED, input={"type": ["string", "array"], "items": {"type": "object"}}),
        kinds=_STREAMS,
        headers=_NARROWING,
    ),
    Operation("GET", "/models", "Model groups that the key may use.", answer=_LIST),
    Operation("GET", "/models/{id}", "One of them."),
    Operation("GET", "/model/info", "Their deployments, with prices and lanes, in LiteLLM's shape."),
    Operation("POST", "/decide", "What would run, and why; runs nothing.", body=_CHAT, headers=_NARROWING),
    Operation("GET", "/decisions/{id}", "A past decision of the same tenant, and what came of it."),
)
_ADMIN: dict[tuple[str, str], tuple[str, dict[str, Any] | None]] = {
    ("GET", "/admin/workers"): ("State of each live worker.", None),
    ("GET", "/admin/pairs"): ("Each pair's standing, and its state on each worker.", None),
    ("GET", "/admin/kv"): ("What each worker's store holds.", None),
    ("GET", "/admin/stops"): ("What is stopped, and what runs on the cache lane all the same.", None),
    ("POST", "/admin/stops"): ("Stop the cache lane, a pair, or a tenant's cache lane.", _STOP),
    ("DELETE", "/admin/stops"): ("Lift a stop.", _STOP),
    ("POST", "/admin/pairs/{pair}/reinstate"): ("Put a demoted pair in force.", _WHY),
    ("DELETE", "/admin/tenants/{tenant}/kv"): ("Destroy all stored KV of a tenant.", None),
    ("POST", "/admin/reload"): ("Put the files as they are now in force.", None),
}


def operations() -> Iterator[Operation]:
    """All, each with its whole path."""
    yield from _OPEN
    for prefix in ("/v1", ""):
        for door in _DOORS:
            yield replace(door, path=prefix + door.path)
        passed = [path for family in FAMILIES for path in (f"/{family}", f"/{family}/{{rest}}")]
        for path in (*passed, *(f"/{family}/{{rest}}" for family in BELOW)):
            for method in METHODS:
                yield _passed(method, prefix + path)
    for method, path in RIGHTS:
        summary, body = _ADMIN.get((method, path), ("Administration.", None))
        yield Operation(method, path, summary, "admin", body=body)


def _passed(method: str, path: str) -> Operation:
    return Operation(
        method,
        path,
        "Passed through to the deployment that serves it.",
        kinds=("*/*",),
        answer={},
        headers=(("x-twolane-model", _TEXT), *_NARROWING),
        any_body=method not in ("GET", "HEAD"),
    )


def document() -> dict[str, Any]:
    """The page."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations():
        paths.setdefault(operation.path, {})[operation.method.lower()] = _written(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "TwoLane", "version": _version(), "description": "An LLM router with two lanes."},
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": _ERROR},
        },
    }


def _written(operation: Operation) -> dict[str, Any]:
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True, "schema": {**_TEXT, "minLength": 1}} for name in names]
    parameters += [{"name": name, "in": "header", "schema": schema} for name, schema in operation.headers]
    failed = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    told: dict[str, Any] = {
        "summary": operation.summary,
        "tags": [{"none": "open", "admin": "admin"}.get(operation.key, "models")],
        "security": [] if operation.key == "none" else [{"key": []}],
        "parameters": parameters,
        "responses": {
            "200": {
                "description": "Done.",
                "content": {kind: {"schema": operation.answer} for kind in operation.kinds},
            },
            "default": {"description": "What went wrong, in OpenAI's shape.", "content": failed},
        },
    }
    if operation.body is not None:
        told["requestBody"] = {"required": True, "content": {"application/json": {"schema": operation.body}}}
    elif operation.any_body:
        kinds = {"application/json": {"schema": _ANY}, "application/octet-stream": {"schema": _TEXT}}
        told["requestBody"] = {"required": False, "content": kinds}
    return told


def _version() -> str:
    try:
        return version("twolane-router")
    except PackageNotFoundError:  # run from a checkout
        return "0"
