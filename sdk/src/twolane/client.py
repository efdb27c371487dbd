"""TwoLane and AsyncTwoLane: openai's clients, with a lane to ask for and a lane to read.

The lane that a client asks for is kept in its default headers, so openai's own `with_options` carries it on.
Two private methods of openai are overridden: `_process_response`, which has the response beside its answer, and
`_validate_headers`, which demands a key that a router on this machine may not need.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final, Self, Unpack
from urllib.parse import quote

from openai import AsyncOpenAI, Omit, OpenAI
from openai.types.chat.completion_create_params import CompletionCreateParamsBase

from twolane.decision import Decision
from twolane.lane import KEEP, Keep, Transport, asked, mark

BASE_URL: Final = "http://127.0.0.1:4000/v1"

NO_KEY: Final = "no-key"
"""Stands where openai demands a key and there is none; never sent."""


class TwoLane(OpenAI):
    """`openai.OpenAI` for a TwoLane router. Further options are openai's own (`timeout`, `max_retries`, ...)."""

    def __init__(
        self,
        *,
        api_key: Any = None,
        base_url: Any = None,
        transport: Transport | None = None,
        latency_budget_ms: float | None = None,
        session: str | None = None,
        deployment: str | None = None,
        default_headers: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        named = {k: v for k, v in asked(transport, latency_budget_ms, session, deployment).items() if v is not None}
        headers = _merged(default_headers or {}, named)
        super().__init__(api_key=_key(api_key), base_url=_url(base_url), default_headers=headers, **options)

    @property
    def default_headers(self) -> dict[str, str | Omit]:
        return {**super().default_headers, **_no_authorization(self.api_key)}

    def lane(
        self,
        *,
        transport: Transport | Keep | None = KEEP,
        latency_budget_ms: float | Keep | None = KEEP,
        session: str | Keep | None = KEEP,
        deployment: str | Keep | None = KEEP,
    ) -> Self:
        """A client that asks for this lane and shares our connections. None takes away; what is not named stays."""
        changes = asked(transport, latency_budget_ms, session, deployment)
        return self.with_options(set_default_headers=_merged(self._custom_headers, changes))

    def decide(self, **request: Unpack[CompletionCreateParamsBase]) -> Decision:
        """The decision that a chat completion with these arguments would get. Runs nothing."""
        return Decision.read(self.post("/decide", cast_to=object, body=dict(request)))

    def decision(self, id: str) -> Decision:
        """A past decision of the caller's tenant; openai.NotFoundError when it is another's or forgotten."""
        return Decision.read(self.get(f"/decisions/{quote(id, safe='')}", cast_to=object))

    def _validate_headers(self, headers: Any, custom_headers: Any) -> None:
        if self.api_key != NO_KEY:
            super()._validate_headers(headers, custom_headers)

    def _process_response(self, *, response: Any, **rest: Any) -> Any:
        answer = super()._process_response(response=response, **rest)
        mark(answer, response.headers)
        return answer


class AsyncTwoLane(AsyncOpenAI):
    """`openai.AsyncOpenAI` for a TwoLane router; see TwoLane."""

    def __init__(
        self,
        *,
        api_key: Any = None,
        base_url: Any = None,
        transport: Transport | None = None,
        latency_budget_ms: float | None = None,
        session: str | None = None,
        deployment: str | None = None,
        default_headers: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        named = {k: v for k, v in asked(transport, latency_budget_ms, session, deployment).items() if v is not None}
        headers = _merged(default_headers or {}, named)
        super().__init__(api_key=_key(api_key), base_url=_url(base_url), default_headers=headers, **options)

    @property
    def default_headers(self) -> dict[str, str | Omit]:
        return {**super().default_headers, **_no_authorization(self.api_key)}

    def lane(
        self,
        *,
        transport: Transport | Keep | None = KEEP,
        latency_budget_ms: float | Keep | None = KEEP,
        session: str | Keep | None = KEEP,
        deployment: str | Keep | None = KEEP,
    ) -> Self:
        """A client that asks for this lane and shares our connections. None takes away; what is not named stays."""
        changes = asked(transport, latency_budget_ms, session, deployment)
        return self.with_options(set_default_headers=_merged(self._custom_headers, changes))

    async def decide(self, **request: Unpack[CompletionCreateParamsBase]) -> Decision:
        """The decision that a chat completion with these arguments would get. Runs nothing."""
        return Decision.read(await self.post("/decide", cast_to=object, body=dict(request)))

    async def decision(self, id: str) -> Decision:
        """A past decision of the caller's tenant; openai.NotFoundError when it is another's or forgotten."""
        return Decision.read(await self.get(f"/decisions/{quote(id, safe='')}", cast_to=object))

    def _validate_headers(self, headers: Any, custom_headers: Any) -> None:
        if self.api_key != NO_KEY:
            super()._validate_headers(headers, custom_headers)

    async def _process_response(self, *, response: Any, **rest: Any) -> Any:
        answer = await super()._process_response(response=response, **rest)
        mark(answer, response.headers)
        return answer


def _key(given: Any) -> Any:
    return given if given is not None else os.environ.get("TWOLANE_API_KEY") or NO_KEY


def _url(given: Any) -> Any:
    return given if given is not None else os.environ.get("TWOLANE_BASE_URL") or BASE_URL


def _no_authorization(key: str) -> dict[str, str | Omit]:
    return {"Authorization": Omit()} if key == NO_KEY else {}


def _merged(headers: Mapping[str, Any], changes: Mapping[str, str | None]) -> dict[str, str]:
    """Headers with the changes applied; names compare without case."""
    kept = {name: value for name, value in headers.items() if name.lower() not in changes}
    return kept | {name: value for name, value in changes.items() if value is not None}
