"""Deployments: the entries of `model_list`, as a person writes them and as the router asks for them."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from policies.facts import Transport
from router.price_table import Name, Table
from router.prices import FREE, NAMES, UNITS, Price, written
from router.wildcards import STAR, filled
from shapes import Field, Shape, model_validator
from workers.config import Config, Span

Kind = Literal["http", "litellm", "relay", "local", "cache"]

OPENAI_LIKE: dict[str, tuple[str | None, str | None]] = {
    "openai": ("https://api.openai.com/v1", "OPENAI_API_KEY"),
    "hosted_vllm": (None, "HOSTED_VLLM_API_KEY"),
    "vllm": (None, "HOSTED_VLLM_API_KEY"),
    "lm_studio": (None, "LM_STUDIO_API_KEY"),
    "llamafile": ("http://127.0.0.1:8080/v1", None),
    "custom_openai": (None, None),
    "openai_like": (None, "OPENAI_LIKE_API_KEY"),
    "litellm_proxy": (None, "LITELLM_PROXY_API_KEY"),
    "openrouter": ("https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
    "groq": ("https://api.groq.com/openai/v1", "GROQ_API_KEY"),
    "together_ai": ("https://api.together.xyz/v1", "TOGETHERAI_API_KEY"),
    "deepseek": ("https://api.deepseek.com/v1", "DEEPSEEK_API_KEY"),
    "mistral": ("https://api.mistral.ai/v1", "MISTRAL_API_KEY"),
    "fireworks_ai": ("https://api.fireworks.ai/inference/v1", "FIREWORKS_API_KEY"),
    "deepinfra": ("https://api.deepinfra.com/v1/openai", "DEEPINFRA_API_KEY"),
    "perplexity": ("https://api.perplexity.ai", "PERPLEXITYAI_API_KEY"),
    "xai": ("https://api.x.ai/v1", "XAI_API_KEY"),
    "nvidia_nim": ("https://integrate.api.nvidia.com/v1", "NVIDIA_NIM_API_KEY"),
    "cerebras": ("https://api.cerebras.ai/v1", "CEREBRAS_API_KEY"),
    "sambanova": ("https://api.sambanova.ai/v1", "SAMBANOVA_API_KEY"),
    "moonshot": ("https://api.moonshot.ai/v1", "MOONSHOT_API_KEY"),
    "novita": ("https://api.novita.ai/v3/openai", "NOVITA_API_KEY"),
    "hyperbolic": ("https://api.hyperbolic.xyz/v1", "HYPERBOLIC_API_KEY"),
    "nebius": ("https://api.studio.nebius.ai/v1", "NEBIUS_API_KEY"),
}
"""Provider prefix -> (base, variable that holds the key when none is written): served over plain HTTP."""

_OLLAMA = frozenset({"ollama", "ollama_chat"})

_FOR_THE_ROUTER = frozenset(
    {"rpm", "tpm", "weight", "order", "max_parallel_requests", "max_budget", "budget_duration", "num_retries"}
)

_SECRET = re.compile(r"key|secret|token|password|credential|headers", re.IGNORECASE)
_COUNTS = re.compile(r"_tokens$|_per_(?:\w+_)?token$|_token_cost$", re.IGNORECASE)

PARAMS = ("litellm_params", "relay_params", "local_params", "cache_params")


class _Limited(Shape):
    """What a deployment may take; for all kinds."""

    rpm: int | None = Field(None, ge=0)
    tpm: int | None = Field(None, ge=0)
    max_parallel_requests: int | None = Field(None, ge=1)
    max_budget: float | None = Field(None, ge=0)
    """USD in each `budget_duration`; without one, in all."""
    budget_duration: Span | None = Field(None, gt=0)


USD = Annotated[float | None, Field(ge=0, allow_inf_nan=False)]
SearchSize = Literal["search_context_size_low", "search_context_size_medium", "search_context_size_high"]


class _Priced(Shape):
    """USD for one token, image, second or character; None takes the table's."""

    input_cost_per_token: USD = None
    output_cost_per_token: USD = None
    cache_read_input_token_cost: USD = None
    cache_creation_input_token_cost: USD = None
    cache_creation_input_token_cost_above_1hr: USD = None
    cache_read_input_audio_token_cost: USD = None
    cache_read_input_image_token_cost: USD = None
    output_cost_per_reasoning_token: USD = None
    input_cost_per_audio_token: USD = None
    output_cost_per_audio_token: USD = None
    input_cost_per_image_token: USD = None
    output_cost_per_image_token: USD = None
    input_cost_per_image: USD = None
    output_cost_per_image: USD = None
    input_cost_per_second: USD = None
    output_cost_per_second: USD = None
    input_cost_per_character: USD = None
    output_cost_per_character: USD = None
    input_cost_per_pixel: USD = None
    output_cost_per_pixel: USD = None
    input_cost_per_request: USD = None
    citation_cost_per_token: USD = None
    search_context_cost_per_query: dict[SearchSize, USD] | None = None


class LiteLLMParams(_Limited, _Priced, extra="allow"):
    """LiteLLM's call parameters. Keys that are not listed are defaults put into the request."""

    model: str = Field(min_length=1)
    api_base: str | None = None
    base_url: str | None = None
    """Another name for `api_base`."""
    api_key: str | None = Field(None, repr=False)
    api_version: str | None = None
    organization: str | None = None
    custom_llm_provider: str | None = None
    extra_headers: dict[str, str] = Field(default_factory=dict, repr=False)
    extra_body: dict[str, Any] = Field(default_factory=dict, repr=False)
    timeout: float | None = Field(None, gt=0)
    """Seconds without an answer, or without a next event."""
    stream_timeout: float | None = Field(None, gt=0)
    max_retries: int | None = Field(None, ge=0)
    num_retries: int | None = Field(None, ge=0)
    weight: float | None = Field(None, ge=0, allow_inf_nan=False)
    order: int | None = None
    mock_response: Any = None
    drop_params: bool | None = None

    @property
    def api_base_written(self) -> str | None:
        return self.api_base or self.base_url

    @property
    def defaults(self) -> dict[str, Any]:
        """Values for body keys that the caller did not send."""
        return dict(self.model_extra)

    @property
    def for_litellm(self) -> dict[str, Any]:
        """Keyword arguments for a call through the litellm package: all that is written but is not the router's."""
        return self.model_dump(exclude_unset=True, exclude=_FOR_THE_ROUTER)

    def __repr__(self) -> str:
        return f"LiteLLMParams(model={self.model!r}, api_base={self.api_base!r})"


class _OnWorkers(Config, _Limited):
    """What LiteLLM writes into `litellm_params`, for the kinds it does not have."""

    weight: float | None = Field(None, ge=0, allow_inf_nan=False)
    order: int | None = None
    timeout: float | None = Field(None, gt=0)


class RelayParams(_OnWorkers):
    """Text lane: the group `sharer` writes a hint that the group `receiver` reads."""

    sharer: str
    receiver: str
    max_hint_tokens: int = Field(128, ge=1)


class LocalParams(_OnWorkers):
    """Text lane: one model of a worker, alone; a name among `models`."""

    model: str
    device_hour_usd: float | None = Field(None, ge=0, allow_inf_nan=False)
    """What an hour of the worker's device costs; null takes what the worker's own entry says."""


class CacheParams(_OnWorkers):
    """Cache lane: a name among `pairs`."""

    pair: str
    device_hour_usd: float | None = Field(None, ge=0, allow_inf_nan=False)
    """As in `local_params`; it pays for both models."""


class Latency(Config):
    """What to expect before anything was measured."""

    ttft_ms: float = Field(gt=0)
    tokens_per_s: float | None = Field(None, gt=0)


class ModelInfo(_Priced, extra="allow"):
    """What is known of a deployment. Other keys are kept as they are."""

    id: str | None = None
    region: str | None = None
    mode: str | None = None
    base_model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_input_tokens: int | None = Field(None, ge=1)
    max_output_tokens: int | None = Field(None, ge=1)
    latency: Latency | None = None


class Deployment(Config):
    """One way to answer for the group `model_name`."""

    model_name: str = Field(min_length=1)
    litellm_params: LiteLLMParams | None = None
    relay_params: RelayParams | None = None
    local_params: LocalParams | None = None
    cache_params: CacheParams | None = None
    model_info: ModelInfo = ModelInfo.model_construct()
    _position: int = 0
    _listed: Price | None = None
    _table: Table | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        written = [name for name in PARAMS if getattr(self, name) is not None]
        if len(written) != 1:
            found = "none is" if not written else f"found {' and '.join(written)}"
            raise ValueError(f"exactly one of {', '.join(PARAMS)} is needed; {found}")
        return self

    @property
    def params(self) -> LiteLLMParams | RelayParams | LocalParams | CacheParams:
        """The one that is written."""
        found = self.litellm_params or self.relay_params or self.local_params or self.cache_params
        assert found is not None  # noqa: S101  (held by the validator)
        return found

    @cached_property
    def id(self) -> str:
        """`model_info.id`, else 12 hex digits over the entry without its secrets, and its place among equal ones."""
        if self.model_info.id is not None:
            return self.model_info.id
        return self.digest if self._position == 0 else f"{self.digest}-{self._position}"

    @cached_property
    def digest(self) -> str:
        """Of the entry without its secrets: a rotated key keeps the id."""
        entry = without_secrets(self.model_dump(mode="json", exclude_unset=True))
        return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()[:12]

    @cached_property
    def kind(self) -> Kind:
        if self.litellm_params is None:
            return "relay" if self.relay_params else "local" if self.local_params else "cache"
        return "http" if self.litellm_params.mock_response is None and self._speaks_openai() else "litellm"

    @property
    def transport(self) -> Transport:
        return "cache" if self.cache_params is not None else "text"

    @cached_property
    def provider(self) -> str:
        """LiteLLM's provider name; empty where LiteLLM infers it from the model's name."""
        params = self.litellm_params
        if params is None:
            return ""
        if params.custom_llm_provider:
            return params.custom_llm_provider
        head, slash, _ = params.model.partition("/")
        if slash:
            return head
        return "openai" if params.api_base_written or params.model.startswith(_OPENAI_NAMES) else ""

    @cached_property
    def upstream_model(self) -> str:
        """What the upstream or worker gets as `model`; stars stand for what those of the group's name do."""
        if self.litellm_params is not None:
            model = self.litellm_params.model
            return model.removeprefix(f"{self.provider}/") if self.kind == "http" else model
        if self.local_params is not None:
            return self.local_params.model
        return self.cache_params.pair if self.cache_params is not None else self.model_name

    def upstream_for(self, model: str) -> str:
        """The upstream's name for what the caller asked: `openai/*` passes on what the group's `*` stood for."""
        return filled(self.upstream_model, self.model_name, model)

    @cached_property
    def api_base(self) -> str | None:
        """Without a trailing slash; None where only the litellm package knows it."""
        params = self.litellm_params
        if params is None:
            return None
        base = params.api_base_written or OPENAI_LIKE.get(self.provider, (None, None))[0]
        return base.rstrip("/") if base else None

    @property
    def api_key(self) -> str | None:
        """The key as written, else from the provider's own variable."""
        if self.litellm_params is None:
            return None
        variable = OPENAI_LIKE.get(self.provider, (None, None))[1]
        return self.litellm_params.api_key or (os.environ.get(variable) if variable else None)

    @property
    def weight(self) -> float:
        """LiteLLM's `weight`, else `rpm`, else `tpm`, else 1."""
        params = self.params
        if params.weight is not None:
            return params.weight
        if isinstance(params, LiteLLMParams):
            return float(params.rpm or params.tpm or 1)
        return 1.0

    @property
    def order(self) -> int:
        """Lower goes first."""
        return 1 if self.params.order is None else self.params.order

    @property
    def timeout(self) -> float | None:
        """Seconds; None takes the router's."""
        return self.params.timeout

    @property
    def num_retries(self) -> int | None:
        """Further tries here after the first; None takes the router's."""
        params = self.litellm_params
        if params is None:
            return None
        return params.num_retries if params.num_retries is not None else params.max_retries

    @cached_property
    def price(self) -> Price:
        """As written here, else as LiteLLM's table has it, else nothing."""
        return self._priced(self._listed or FREE)

    @cached_property
    def _prices(self) -> dict[str, Price]:
        """By name, of those that a wildcard was asked for."""
        return {}

    @property
    def wild(self) -> bool:
        """Its upstream is asked for the model that the caller names."""
        return STAR in self.upstream_model

    def price_of(self, model: str) -> Price:
        """Of a model that a wildcard was asked for, by the name that the upstream gets; else its own."""
        params, table = self.litellm_params, self._table
        if params is None or table is None:
            return self.price
        found = self._prices.get(model)
        if found is None:
            if len(self._prices) >= _MOST_PRICES:
                self._prices.clear()
            names = self._names(filled(params.model, self.model_name, model))
            found = self._prices[model] = self._priced(table.price(names) or FREE)
        return found

    def _priced(self, listed: Price) -> Price:
        params, info = self.litellm_params, self.model_info
        said = {
            name: usd for name in NAMES if (usd := _first(getattr(params, name, None), getattr(info, name))) is not None
        }
        searches = params.search_context_cost_per_query if params is not None else None
        searches = info.search_context_cost_per_query if searches is None else searches
        if not said and searches is None:
            return listed
        # The table's finer prices would not be the same model's any more.
        pictures = () if any(name in UNITS for name in said) else listed.pictures
        plain = replace(listed, above=None, long=None, tiers=(), pictures=pictures, uncounted=False)
        return written(said, plain, searches)

    @property
    def priced_as(self) -> tuple[Name, ...]:
        """What LiteLLM's table may call this model, the best first; empty where nothing is to be looked up."""
        params = self.litellm_params
        return () if params is None or self.wild else self._names(params.model)

    def _names(self, model: str) -> tuple[Name, ...]:
        bare = model.removeprefix(f"{self.provider}/")
        base = ((self.model_info.base_model, None),) if self.model_info.base_model else ()
        return (*base, (f"{self.provider}/{bare}", None), (model, None), (bare, self.provider or None))

    def _speaks_openai(self) -> bool:
        params = self.litellm_params
        if params is None or params.api_version is not None:
            return False
        if self.provider in _OLLAMA:
            return (params.api_base_written or "").rstrip("/").endswith("/v1")
        return self.provider in OPENAI_LIKE and self.api_base is not None


_MOST_PRICES = 1000
"""Of one wildcard that are remembered; any name may be asked for."""
_OPENAI_NAMES = ("gpt-", "o1", "o3", "o4", "chatgpt-", "text-embedding-", "ft:gpt-")


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def price(deployments: Sequence[Deployment], path: Path) -> None:
    """Give each its price of the table in `path`. Raises OSError and ValueError."""
    table = Table(path)
    for deployment in deployments:
        if deployment.wild:
            deployment._table = table
        elif deployment.priced_as:
            deployment._listed = table.price(deployment.priced_as)


def without_secrets(value: Any) -> Any:
    """A mapping without the keys that may hold keys, tokens, passwords or headers, at any depth."""
    if isinstance(value, dict):
        return {k: without_secrets(v) for k, v in value.items() if _COUNTS.search(str(k)) or not _SECRET.search(str(k))}
    if isinstance(value, list):
        return [without_secrets(v) for v in value]
    return value


def number(deployments: Iterable[Deployment]) -> None:
    """Give equal entries their places, so that their ids differ. Raises ValueError for an id written twice."""
    seen: dict[str, int] = {}
    for deployment in deployments:
        if deployment.model_info.id is not None:
            if deployment.model_info.id in seen:
                raise ValueError(f"model_info.id {deployment.model_info.id!r} is written twice")
            seen[deployment.model_info.id] = 1
        else:
            deployment._position = seen.get(deployment.digest, 0)
            seen[deployment.digest] = deployment._position + 1
