"""What answers cost. Prices stand in the configuration, else in LiteLLM's table, which is read as data: a file of JSON.

Knows no deployments and no tenants.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from router.call import Usage

_ABOVE = re.compile(r"(input_cost_per_token|output_cost_per_token|cache_read_input_token_cost)_above_(\d+)k_tokens$")
TOKENS = ("input_cost_per_token", "output_cost_per_token", "cache_read_input_token_cost")
"""LiteLLM's names, in the table and in the configuration."""
_READ = {
    "input_cost_per_audio_token": "heard",
    "input_cost_per_image_token": "seen",
    "cache_creation_input_token_cost": "stored",
}
_WRITTEN = {
    "output_cost_per_reasoning_token": "reasoned",
    "output_cost_per_audio_token": "spoken",
    "output_cost_per_image_token": "drawn",
}
KINDS = _READ | _WRITTEN
"""Kinds of tokens, which are among the prompt's or the completion's, and may have a price of their own."""
_OF_ANSWER = frozenset(_WRITTEN.values())
UNITS = {
    "output_cost_per_image": "images",
    "input_cost_per_image": "images",
    "input_cost_per_second": "seconds",
    "output_cost_per_second": "seconds",
    "input_cost_per_character": "characters",
    "output_cost_per_character": "characters",
}
"""What doors of images and sound count. Where a table prices both directions it means one and the same thing: once."""

NAMES = (*TOKENS, *KINDS, *UNITS)
"""Every price that is billed."""

Amounts = tuple[tuple[str, float], ...]
"""USD by what is counted."""


@dataclass(frozen=True, slots=True)
class Price:
    """USD per token, and of what else an answer may count."""

    prompt: float = 0.0
    completion: float = 0.0
    cached: float | None = None
    """Of a prompt token that the upstream had read before; None bills it as any other."""
    above: int | None = None
    """Longer prompts are billed as `long`, all of them."""
    long: Price | None = None
    kinds: Amounts = ()
    """Of tokens by kind; one that is not named is billed as any other."""
    units: Amounts = ()
    """Of images, seconds and characters."""

    def of(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> float:
        """USD for one call. Cached tokens are among the prompt's."""
        if self.long is not None and self.above is not None and prompt_tokens > self.above:
            return self.long.of(prompt_tokens, completion_tokens, cached_tokens)
        if self.cached is None or not cached_tokens:
            return prompt_tokens * self.prompt + completion_tokens * self.completion
        fresh = prompt_tokens - cached_tokens
        return fresh * self.prompt + cached_tokens * self.cached + completion_tokens * self.completion

    def bill(self, used: Usage) -> float | None:
        """USD for what an answer used; None where it did not tell what the price counts.

        Tokens are billed where they have a price and were told, else images, seconds and characters.
        """
        counted = used.counted
        if used.known and (self.prompt or self.completion or self.kinds):
            usd = self.of(used.prompt_tokens, used.completion_tokens, used.cached_tokens)
            return usd if counted is None or not self.kinds else usd + self._beyond(used, counted)
        if self.units and counted is not None:
            found = [usd * counted[what] for what, usd in self.units if what in counted]
            if found:
                return sum(found)
        return 0.0 if self._free else None

    def named(self) -> dict[str, float | None]:
        """By LiteLLM's names: those of tokens always, others where they have a price."""
        beyond = dict(self.kinds + self.units)
        names = {what: name for name, what in reversed((KINDS | UNITS).items())}
        plain = zip(TOKENS, (self.prompt, self.completion, self.cached), strict=True)
        return {**dict(plain), **{names[what]: usd for what, usd in beyond.items()}}

    @property
    def _free(self) -> bool:
        amounts = (self.prompt, self.completion, self.cached, *dict(self.kinds + self.units).values())
        return not any(amounts)

    def _beyond(self, used: Usage, counted: Mapping[str, float]) -> float:
        """USD by which tokens of kinds cost more, or less, than plain ones. No token is of two kinds."""
        if self.long is not None and self.above is not None and used.prompt_tokens > self.above:
            return self.long._beyond(used, counted)
        read: float = used.prompt_tokens - used.cached_tokens
        written: float = used.completion_tokens
        beyond = 0.0
        for what, usd in self.kinds:
            if what in _OF_ANSWER:
                amount = min(counted.get(what, 0), written)
                written -= amount
                beyond += amount * (usd - self.completion)
            else:
                amount = min(counted.get(what, 0), read)
                read -= amount
                beyond += amount * (usd - self.prompt)
        return beyond


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


def _price(entry: Mapping[str, object]) -> Price:
    plain = _tier(entry, "", FREE)
    longer: Price | None = None
    above: int | None = None
    for bound in sorted({int(found[2]) for key in entry if (found := _ABOVE.match(key))}, reverse=True):
        longer = replace(_tier(entry, f"_above_{bound}k_tokens", plain), above=above, long=longer)
        above = bound * 1000
    return replace(plain, above=above, long=longer)


def _tier(entry: Mapping[str, object], suffix: str, base: Price) -> Price:
    """What the tier's keys say, over what `base` has."""
    said = {name: usd for name in NAMES if (usd := _usd(entry.get(name + suffix))) is not None}
    return written(said, base)


def _usd(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and value >= 0 else None


def written(said: Mapping[str, float], base: Price) -> Price:
    """Prices by LiteLLM's names over what `base` has."""
    prompt, completion, cached = TOKENS
    return replace(
        base,
        prompt=said.get(prompt, base.prompt),
        completion=said.get(completion, base.completion),
        cached=said.get(cached, base.cached),
        kinds=_over(base.kinds, said, KINDS),
        units=_over(base.units, said, UNITS),
    )


def _over(base: Amounts, said: Mapping[str, float], names: Mapping[str, str]) -> Amounts:
    """Of two names for one thing the one that costs anything holds."""
    found: dict[str, float] = {}
    for name, what in names.items():
        if name in said:
            found[what] = max(found.get(what, 0.0), said[name])
    return tuple((dict(base) | found).items())
