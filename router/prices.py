"""What answers cost: prices by LiteLLM's names, as they stand in the configuration or in its table (`price_table`).

Knows no deployments and no tenants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.call import Usage

TOKENS = ("input_cost_per_token", "output_cost_per_token", "cache_read_input_token_cost")
"""LiteLLM's names, in the table and in the configuration."""
_READ = {
    "input_cost_per_audio_token": "heard",
    "input_cost_per_image_token": "seen",
    "cache_creation_input_token_cost": "stored",
    "cache_creation_input_token_cost_above_1hr": "stored_1h",
}
_READ_AGAIN = {
    "cache_read_input_audio_token_cost": "heard_again",
    "cache_read_input_image_token_cost": "seen_again",
}
"""Of cached tokens."""
_WRITTEN = {
    "output_cost_per_reasoning_token": "reasoned",
    "output_cost_per_audio_token": "spoken",
    "output_cost_per_image_token": "drawn",
}
KINDS = _READ | _READ_AGAIN | _WRITTEN
"""Kinds of tokens, which are among the prompt's or the completion's, and may have a price of their own."""
_OF_ANSWER = frozenset(_WRITTEN.values())
_CACHED = frozenset(_READ_AGAIN.values())
UNITS = {
    "output_cost_per_image": "images",
    "input_cost_per_image": "images",
    "input_cost_per_second": "seconds",
    "output_cost_per_second": "seconds",
    "input_cost_per_character": "characters",
    "output_cost_per_character": "characters",
    "input_cost_per_pixel": "pixels",
    "output_cost_per_pixel": "pixels",
}
"""What doors of images and sound count. Where a table prices both directions it means one and the same thing: once."""

FEES = {"input_cost_per_request": "requests", "citation_cost_per_token": "cited"}
"""What is billed beside tokens."""
SEARCHES = "search_context_cost_per_query"
"""Likewise: a price of a search for each size of what it finds."""
_SIZES = {f"search_context_size_{size}": f"searches_{size}" for size in ("low", "medium", "high")}

NAMES = (*TOKENS, *KINDS, *UNITS, *FEES)
"""Every price that is billed and is one number."""

TIERS = {
    "priority": "_priority",
    "flex": "_flex",
    "batch": "_batches",
    "ultrafast": "_ultrafast",
    "balanced": "_balanced",
    "decisions": "_decisions",
}
"""Service tiers, as requests and answers name them, and how the table's names of their prices end."""
IMAGE_TOKENS = 6240
"""Tokens reserved for one image where tokens are what it costs: those of the largest and best of `gpt-image-1`."""
USUAL_SIZE = "1024x1024"
"""Of an image of which nobody said another."""
_STANDARD = ("standard", "")

Amounts = tuple[tuple[str, float], ...]
"""USD by what is counted."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One way to ask for an image, and what it costs."""

    quality: str
    """Empty where the table does not tell them apart."""
    size: str
    usd: float


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request may use at most, as far as it tells."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    kinds: frozenset[str] = frozenset()
    """Kinds of tokens that may be among them."""
    counted: Mapping[str, float] = field(default_factory=dict)
    """Images, seconds, characters, pixels."""
    quality: str = ""
    size: str = ""
    tier: str = ""


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
    """Of images, seconds, characters and pixels."""
    fees: Amounts = ()
    """Of requests, searches and cited tokens, beside all else."""
    pictures: tuple[Picture, ...] = ()
    """Of images by quality and size, where the table has such."""
    tiers: tuple[tuple[str, Price], ...] = ()
    """By service tier, where it is another."""
    uncounted: bool = False
    """The table prices it by what nobody counts here, and by nothing else: it is not free, but its cost is unknown."""
    free: bool = field(init=False, repr=False, compare=False)
    """Nothing that it names costs anything; found once, for every answer asks."""

    def __post_init__(self) -> None:
        amounts = (self.prompt, self.completion, self.cached, *dict(self.kinds + self.units + self.fees).values())
        costs = any(amounts) or any(picture.usd for picture in self.pictures) or self.uncounted
        object.__setattr__(self, "free", not costs)

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
        if self.tiers and used.tier and (price := self.tier(used.tier)) is not self:
            return price.bill(used)
        counted = used.counted
        if used.known and (self.prompt or self.completion or self.kinds):
            usd = self.of(used.prompt_tokens, used.completion_tokens, used.cached_tokens)
            if self.fees:
                usd += self.fee(counted or {})
            return usd if counted is None or not self.kinds else usd + self._beyond(used, counted)
        if self.pictures and counted is not None and "images" in counted:
            return self._pictures(counted["images"], *(used.image or ("", "")))
        if self.units and counted is not None and (flat := self._units(counted)) is not None:
            return flat
        if self.fees and used.known:
            return self.fee(counted or {})
        return 0.0 if self.free else None

    def fee(self, counted: Mapping[str, float]) -> float:
        """USD for one request beside its tokens."""
        return sum(usd * (1 if what == "requests" else counted.get(what, 0)) for what, usd in self.fees)

    def reserve(self, asked: Asked) -> float:
        """USD that an answer to this may cost: at the dearest kind of token, quality or size that is left open."""
        price = self.tier(asked.tier) if asked.tier else self
        tokens = price._dearest(asked) + price.fee(asked.counted)
        counted = asked.counted
        if "images" not in counted:
            return max(tokens, price._units(counted) or 0.0)
        images = counted["images"]
        fits = [p.usd for p in price.pictures if asked.quality in ("", p.quality) and asked.size in ("", p.size)]
        flat = [images * usd for usd in fits or [p.usd for p in price.pictures]]
        unit = price._units(counted)
        if unit is not None and (not fits or not asked.quality or not asked.size):
            flat.append(unit)
        drawn = dict(price.kinds).get("drawn", price.completion)
        return max(tokens, max(flat) if flat else images * IMAGE_TOKENS * drawn)

    def tier(self, name: str) -> Price:
        """What a service tier costs; this where no price is told of it."""
        return next((price for tier, price in self.tiers if tier == name), self)

    def _dearest(self, asked: Asked) -> float:
        prompt, answer = asked.prompt_tokens, asked.completion_tokens
        if self.long is not None and self.above is not None and prompt > self.above:
            return self.long._dearest(asked)
        may = {what: usd for what, usd in self.kinds if what in asked.kinds}
        read = max(self.prompt, *(usd for what, usd in may.items() if what not in _OF_ANSWER), 0.0)
        written = max(self.completion, *(usd for what, usd in may.items() if what in _OF_ANSWER), 0.0)
        return prompt * read + answer * written

    def _units(self, counted: Mapping[str, float]) -> float | None:
        """Of images or pixels the first that has a price: they are two measures of one thing."""
        prices = dict(self.units)
        if "images" in prices:
            prices.pop("pixels", None)
        found = [usd * counted[what] for what, usd in prices.items() if what in counted]
        return sum(found) if found else None

    def _pictures(self, images: float, quality: str, size: str) -> float | None:
        """Where no quality was told, the standard one holds; None where that could be several."""
        sized = {p.quality: p.usd for p in self.pictures if p.size == (size or USUAL_SIZE)}
        names = (quality,) if quality else _STANDARD
        usd = next((sized[name] for name in (*names, "") if name in sized), None)
        if usd is not None:
            return images * usd
        return self._units({"images": images})

    @property
    def dear(self) -> bool:
        """Some kind of token costs more than a plain one."""
        return any(usd > (self.completion if what in _OF_ANSWER else self.prompt) for what, usd in self.kinds) or (
            self.long is not None and self.long.dear
        )

    def named(self) -> dict[str, float | None]:
        """By LiteLLM's names: those of tokens always, others where they have a price."""
        beyond = dict(self.kinds + self.units + self.fees)
        names = {what: name for name, what in reversed((KINDS | UNITS | FEES).items())}
        plain = zip(TOKENS, (self.prompt, self.completion, self.cached), strict=True)
        return {**dict(plain), **{names[what]: usd for what, usd in beyond.items() if what in names}}

    def _beyond(self, used: Usage, counted: Mapping[str, float]) -> float:
        """USD by which tokens of kinds cost more, or less, than plain ones. No token is of two kinds."""
        if self.long is not None and self.above is not None and used.prompt_tokens > self.above:
            return self.long._beyond(used, counted)
        read: float = used.prompt_tokens - used.cached_tokens
        again: float = used.cached_tokens
        written: float = used.completion_tokens
        beyond = 0.0
        if "stored_1h" in counted and "stored_1h" not in dict(self.kinds):
            counted = {**counted, "stored": counted.get("stored", 0) + counted["stored_1h"]}
        for what, usd in self.kinds:
            if what in _CACHED:
                amount = min(counted.get(what, 0), again)
                again -= amount
                beyond += amount * (usd - (self.prompt if self.cached is None else self.cached))
            elif what in _OF_ANSWER:
                amount = min(counted.get(what, 0), written)
                written -= amount
                beyond += amount * (usd - self.completion)
            else:
                amount = min(counted.get(what, 0), read)
                read -= amount
                beyond += amount * (usd - self.prompt)
        return beyond


FREE = Price()


def written(said: Mapping[str, float], base: Price, searches: object = None) -> Price:
    """Prices by LiteLLM's names over what `base` has; `searches` by size."""
    prompt, completion, cached = TOKENS
    return replace(
        base,
        prompt=said.get(prompt, base.prompt),
        completion=said.get(completion, base.completion),
        cached=said.get(cached, base.cached),
        kinds=_over(base.kinds, said, KINDS),
        units=_over(base.units, said, UNITS),
        fees=_over(_over(base.fees, said, FEES), _searches(searches), _SIZES),
    )


def _searches(by_size: object) -> dict[str, float]:
    found = by_size.items() if isinstance(by_size, Mapping) else ()
    return {size: usd for size, value in found if size in _SIZES and (usd := usd_of(value)) is not None}


def _over(base: Amounts, said: Mapping[str, float], names: Mapping[str, str]) -> Amounts:
    """Of two names for one thing the one that costs anything holds."""
    found: dict[str, float] = {}
    for name, what in names.items():
        if name in said:
            found[what] = max(found.get(what, 0.0), said[name])
    return tuple((dict(base) | found).items())


def usd_of(value: object) -> float | None:
    """A price as it is written; None for what is none."""
    return float(value) if isinstance(value, (int, float)) and value >= 0 else None
