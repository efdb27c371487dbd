"""What tokens cost. Prices stand in the configuration, else in LiteLLM's table, which is read as data: a file of JSON.

Knows no deployments and no tenants.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

_ABOVE = re.compile(r"(input_cost_per_token|output_cost_per_token|cache_read_input_token_cost)_above_(\d+)k_tokens$")
PRICES = {
    "input_cost_per_token": "prompt",
    "output_cost_per_token": "completion",
    "cache_read_input_token_cost": "cached",
}
"""LiteLLM's names, in the table and in the configuration -> ours."""


@dataclass(frozen=True, slots=True)
class Price:
    """USD per token."""

    prompt: float = 0.0
    completion: float = 0.0
    cached: float | None = None
    """Of a prompt token that the upstream had read before; None bills it as any other."""
    above: int | None = None
    """Longer prompts are billed as `long`, all of them."""
    long: Price | None = None

    def of(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> float:
        """USD for one call. Cached tokens are among the prompt's."""
        if self.long is not None and self.above is not None and prompt_tokens > self.above:
            return self.long.of(prompt_tokens, completion_tokens, cached_tokens)
        if self.cached is None or not cached_tokens:
            return prompt_tokens * self.prompt + completion_tokens * self.completion
        fresh = prompt_tokens - cached_tokens
        return fresh * self.prompt + cached_tokens * self.cached + completion_tokens * self.completion


FREE = Price()


def table_path() -> Path | None:
    """LiteLLM's own table, where the package is installed. It is not imported: that takes seconds and 200 MB."""
    spec = importlib.util.find_spec("litellm")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name("model_prices_and_context_window_backup.json")
    return path if path.is_file() else None


Name = tuple[str, str | None]
"""A model as the table names it, and the provider that its entry must be of; None takes any."""


def listed(path: Path, names: Iterable[Name]) -> dict[Name, Price]:
    """Prices of those of `names` that the table has. Raises OSError, and ValueError where the file is no table."""
    content = path.read_bytes()
    try:
        table = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        entries = {
            name: msgspec.json.decode(table[name[0]], type=dict[str, object]) for name in names if name[0] in table
        }
    except msgspec.DecodeError as error:
        raise ValueError(f"{path.name} is no price table: {error}") from None
    return {name: _price(entry) for name, entry in entries.items() if name[1] in (None, entry.get("litellm_provider"))}


def _price(entry: dict[str, object]) -> Price:
    plain = _tier(entry, "", FREE)
    longer: Price | None = None
    above: int | None = None
    for bound in sorted({int(found[2]) for key in entry if (found := _ABOVE.match(key))}, reverse=True):
        longer = replace(_tier(entry, f"_above_{bound}k_tokens", plain), above=above, long=longer)
        above = bound * 1000
    return replace(plain, above=above, long=longer)


def _tier(entry: dict[str, object], suffix: str, base: Price) -> Price:
    """What the tier's keys say, over what `base` has."""

    def usd(name: str) -> float | None:
        value = entry.get(name + suffix)
        return float(value) if isinstance(value, (int, float)) and value >= 0 else None

    prompt, completion, cached = map(usd, PRICES)
    return replace(
        base,
        prompt=base.prompt if prompt is None else prompt,
        completion=base.completion if completion is None else completion,
        cached=base.cached if cached is None else cached,
    )
