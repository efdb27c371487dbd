"""The text lane over plain HTTP: any upstream that speaks OpenAI's interface."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import structlog

from router.call import Call, Reply
from router.deployments import Deployment
from router.errors import Refused
from router.transports.openai_http import Pools, Target, exchange
from router.transports.raw_http import carry
from router.wildcards import STAR

log = structlog.get_logger("twolane.router")

_USAGE = "stream_options"
_NOT_BODY = frozenset(
    {
        "additional_drop_params",
        "allowed_openai_params",
        "budget_duration",
        "configurable_clientside_auth_params",
        "itpm",
        "litellm_credential_name",
        "litellm_trace_id",
        "max_budget",
        "otpm",
        "rust",
        "tag_regex",
        "tags",
        "use_in_pass_through",
        "use_litellm_proxy",
    }
)
"""LiteLLM's keys that stand among the defaults but are no part of a request."""


class TextHTTP:
    """One deployment whose upstream is called as it is, with no translation."""

    def __init__(self, deployment: Deployment, pools: Pools, *, timeout: float, stream_timeout: float | None) -> None:
        self._deployment = deployment
        self._pools = pools
        self._target = target(deployment, timeout=timeout, stream_timeout=stream_timeout)
        self._wild = STAR in deployment.upstream_model

    async def send(self, call: Call) -> Reply:
        chosen = self._target
        if self._wild:
            chosen = replace(chosen, model=self._deployment.upstream_for(call.model))
        if call.raw is not None:
            return await carry(self._pools, chosen, call, call.raw)
        try:
            return await exchange(self._pools, chosen, call)
        except Refused as error:
            if not call.stream or call.include_usage or not chosen.asks_usage or _USAGE not in f"{error} {error.param}":
                raise
        return await self._without_usage(replace(chosen, asks_usage=False), call)

    async def _without_usage(self, chosen: Target, call: Call) -> Reply:
        """What was refused for what we added to it, as the caller sent it; where that works it is added no more."""
        reply = await exchange(self._pools, chosen, call)
        if self._target.asks_usage:
            self._target = replace(self._target, asks_usage=False)
            log.warning("upstream_takes_no_stream_options", deployment=self._deployment.id)
        return reply

    async def close(self) -> None:
        """Nothing of its own: whoever made the pools closes them."""


def target(deployment: Deployment, *, timeout: float, stream_timeout: float | None) -> Target:
    """What the entry says, read once. `timeout` and `stream_timeout` are the router's, where the entry has none."""
    params = deployment.litellm_params
    if params is None or deployment.api_base is None:
        raise ValueError(f"deployment {deployment.id} is not served over plain HTTP")
    key = deployment.api_key
    headers = {"authorization": f"Bearer {key}"} if key else {}
    if params.organization:
        headers["openai-organization"] = params.organization
    headers |= {name.lower(): value for name, value in (params.extra_headers or {}).items()}
    extra: dict[str, Any] = params.defaults
    defaults = {k: v for k, v in extra.items() if k not in _NOT_BODY and "_cost" not in k} | params.extra_body
    secret = (key, *(params.extra_headers or {}).values())
    return Target(
        base=deployment.api_base,
        model=deployment.upstream_model,
        headers=headers,
        defaults={name: msgspec.Raw(msgspec.json.encode(value)) for name, value in defaults.items()},
        dropped=frozenset(extra.get("additional_drop_params") or ()),
        timeout=deployment.timeout or timeout,
        stream_timeout=params.stream_timeout or (None if deployment.timeout else stream_timeout),
        asks_usage=_USAGE not in (extra.get("additional_drop_params") or ()),
        secrets=tuple(s for s in secret if s and len(s) >= 8),
    )
