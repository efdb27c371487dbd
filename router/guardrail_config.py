"""Guardrails as a person writes them: LiteLLM's entries for its generic HTTP interface, or a class of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from policies.hooks import Hook
from shapes import Field, Shape, model_validator
from workers.config import Config, Span

Stage = Literal["request", "response"]
Mode = Literal["pre_call", "during_call", "post_call"]
GENERIC = "generic_guardrail_api"
_MODES = ("pre_call", "during_call", "post_call")


class OwnGuardrail(Hook):
    """`use: "pkg.mod:Class"`: a class with a method `check` (see docs/guardrails.md)."""

    verb: ClassVar[str] = "check"
    may_wait: ClassVar[bool] = True

    @property
    def made(self) -> Any:
        """The instance; made when the file was read."""
        return self._made


class GuardrailParams(Shape, extra="forbid"):
    """LiteLLM's `litellm_params` of a guardrail, without those that let something pass unchecked."""

    guardrail: Literal["generic_guardrail_api"]
    mode: Mode | tuple[Mode, ...]
    """`during_call` is done before the call: nothing leaves for a model unchecked."""
    api_base: str = Field(pattern=r"^https?://[^\s/]+")
    api_key: str | None = Field(None, repr=False)
    """Sent as `x-api-key`."""
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    default_on: bool = False
    additional_provider_specific_params: dict[str, Any] = Field(default_factory=dict, repr=False)
    timeout: Span = 10.0
    unreachable_fallback: Literal["fail_closed"] = "fail_closed"
    fail_on_error: Literal[True] = True


class GuardrailConfig(Config):
    """One entry of `guardrails`."""

    guardrail_name: str = Field(min_length=1, pattern=r"^[^,\s]+$")
    litellm_params: GuardrailParams | None = None
    own: OwnGuardrail | None = None
    mode: Mode | tuple[Mode, ...] = ("pre_call", "post_call")
    """Of `own`."""
    default_on: bool = True
    """Of `own`: applies to every request; else to those that a tenant or the caller names it for."""
    within: Span = Field(10.0, gt=0)
    """Seconds that `own` may take."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.litellm_params is None) == (self.own is None):
            raise ValueError("exactly one of litellm_params, own is needed")
        return self

    @property
    def on(self) -> bool:
        """Applies without being named."""
        return self.default_on if self.litellm_params is None else self.litellm_params.default_on

    @property
    def timeout(self) -> float:
        """Seconds for one check."""
        return self.within if self.litellm_params is None else self.litellm_params.timeout

    @property
    def stages(self) -> frozenset[Stage]:
        mode = self.mode if self.litellm_params is None else self.litellm_params.mode
        modes = {mode} if isinstance(mode, str) else set(mode)
        return frozenset("response" if m == "post_call" else "request" for m in modes)


def foreign(entry: object) -> str | None:
    """Why an entry is beyond what is done here, though LiteLLM may do it; None where it is not."""
    params = entry.get("litellm_params") if isinstance(entry, Mapping) else None
    if not isinstance(params, Mapping):
        return None
    if params.get("guardrail") != GENERIC:
        return f"only {GENERIC} and classes of your own (`own: {{use: ...}}`) are run here"
    written = params.get("mode")
    modes = written if isinstance(written, list) else [written]
    odd = next((m for m in modes if isinstance(m, str) and m not in _MODES), None)
    if odd is not None:
        return f"mode {odd} is not done here"
    if params.get("unreachable_fallback") == "fail_open" or params.get("fail_on_error") is False:
        return "a guardrail that cannot check refuses here; remove the key that lets requests pass"
    return None
