"""What answers cost. Prices stand in the configuration, else in LiteLLM's table, which is read as data: a file of JSON.

Knows no deployments and no tenants.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from router.call import Usage

_ABOVE = re.compile(r"(input_cost_per_token|output_cost_per_token|cache_read_input_token_cost)_above_(\d+)k_tokens$")
_SIZED = re.compile(r"(?:([^/]+)/)??(?:([a-z]+)/)?(\d+)-x-(\d+)/(.+)$")
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
    "input_cost_per_pixel": "pixels",
    "output_cost_per_pixel": "pixels",
}
"""What doors of images and sound count. Where a table prices both directions it means one and the same thing: once."""

NAMES = (*TOKENS, *KINDS, *UNITS)
"""Every price that is billed."""

TIERS = {"priority": "_priority", "flex": "_flex", "batch": "_batches"}
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
    pictures: tuple[Picture, ...] = ()
    """Of images by quality and size, where the table has such."""
    tiers: tuple[tuple[str, Price], ...] = ()
    """By service tier, where it is another."""
    uncounted: bool = False
    """The table prices it by what nobody counts here, and by nothing else: it is not free, but its cost is unknown."""
    free: bool = field(init=False, repr=False, compare=False)
    """Nothing that it names costs anything; found once, for every answer asks."""

    def __post_init__(self) -> None:
        amounts = (self.prompt, self.completion, self.cached, *dict(self.kinds + self.units).values())
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
            return usd if counted is None or not self.kinds else usd + self._beyond(used, counted)
        if self.pictures and counted is not None and "images" in counted:
            return self._pictures(counted["images"], *(used.image or ("", "")))
        if self.units and counted is not None and (flat := self._units(counted)) is not None:
            return flat
        return 0.0 if self.free else None

    def reserve(self, asked: Asked) -> float:
        """USD that an answer to this may cost: at the dearest kind of token, quality or size that is left open."""
        price = self.tier(asked.tier) if asked.tier else self
        tokens = price._dearest(asked)
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
        beyond = dict(self.kinds + self.units)
        names = {what: name for name, what in reversed((KINDS | UNITS).items())}
        plain = zip(TOKENS, (self.prompt, self.completion, self.cached), strict=True)
        return {**dict(plain), **{names[what]: usd for what, usd in beyond.items()}}

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


class Table:
    """LiteLLM's table: some megabytes, so it is kept only where names are still to be looked up."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, and ValueError where the file is no table."""
        self._name = path.name
        try:
            self._entries = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
        except msgspec.DecodeError as error:
            raise ValueError(f"{path.name} is no price table: {error}") from None
        self._sized = [key for key in self._entries if "-x-" in key]

    def prices(self, names: Iterable[Name]) -> dict[Name, Price]:
        """Of those that it has. Raises ValueError for an entry that is none."""
        table, wanted = self._entries, set(names)
        try:
            entries = {name: _entry(table[name[0]]) for name in wanted if name[0] in table}
            drawn = {name: _entry(table[name]) for name in _composed(self._sized, wanted)}
        except msgspec.DecodeError as error:
            raise ValueError(f"{self._name} is no price table: {error}") from None
        of = {name: entry for name, entry in entries.items() if name[1] in (None, entry.get("litellm_provider"))}
        found = {name: _price(entry) for name, entry in of.items()}
        for name in wanted:
            pictures = _pictures(name, drawn)
            if pictures:
                found[name] = replace(found.get(name, FREE), pictures=pictures)
        return found

    def price(self, names: Sequence[Name]) -> Price | None:
        """Of the first of several names for one model that it has; None for a model that it has not."""
        found = self.prices(names)
        prices = [found[name] for name in names if name in found]
        pictures = next((price.pictures for price in prices if price.pictures), ())
        # A name may be listed by sizes alone, while the next has the prices of tokens.
        plain = next((price for price in prices if replace(price, pictures=()) != FREE), FREE)
        return replace(plain, pictures=pictures) if prices else None


def listed(path: Path, names: Iterable[Name]) -> dict[Name, Price]:
    """Prices of those of `names` that the table has. Raises OSError, and ValueError where the file is no table."""
    return Table(path).prices(names)


_entry = msgspec.json.Decoder(dict[str, object]).decode


def _composed(sized: Iterable[str], wanted: Iterable[Name]) -> list[str]:
    """Names with a size in them that are of one of these models: `high/1024-x-1024/gpt-image-1`."""
    ends = tuple({"/" + end for name, _ in wanted for end in (name, name.partition("/")[2]) if end})
    return [key for key in sized if key.endswith(ends)]


def _pictures(name: Name, drawn: Mapping[str, Mapping[str, object]]) -> tuple[Picture, ...]:
    """What the table's composed names say of one model. Its provider may stand before or behind the size."""
    model, wanted = name
    found = []
    for key, entry in drawn.items():
        match, provider = _SIZED.match(key), entry.get("litellm_provider")
        if match is None or wanted not in (None, provider):
            continue
        before, quality, width, height, bare = match.groups()
        if before is None and quality == provider:
            before, quality = provider, None
        names = {bare, f"{provider}/{bare}"} if before in (None, provider) else set()
        if before == provider and wanted is None:
            names.discard(bare)  # another provider's model may have the bare name
        if model in names and (usd := _per_image(entry, int(width) * int(height))) is not None:
            found.append(Picture(quality or "", f"{width}x{height}", usd))
    return tuple(found)


def _per_image(entry: Mapping[str, object], pixels: int) -> float | None:
    unit = dict(_tier(entry, "", FREE).units)
    return unit["images"] if "images" in unit else unit["pixels"] * pixels if "pixels" in unit else None


def _price(entry: Mapping[str, object]) -> Price:
    plain = _ladder(entry, "")
    tiers = [(name, end) for name, end in TIERS.items() if any(key.endswith(end) for key in entry)]
    tiered = tuple((name, _ladder(entry, end)) for name, end in tiers)
    odd = plain.free and any(_usd(usd) for key, usd in entry.items() if "cost" in key)
    return replace(plain, tiers=tiered, uncounted=odd)


def _ladder(entry: Mapping[str, object], tier: str) -> Price:
    """The prices of a service tier, by length of the prompt; what it has not of its own is as everywhere."""
    plain = _tier(entry, tier, _tier(entry, "", FREE))
    longer: Price | None = None
    above: int | None = None
    for bound in sorted({int(found[2]) for key in entry if (found := _ABOVE.match(key))}, reverse=True):
        step = f"_above_{bound}k_tokens"
        longer = replace(_tier(entry, step + tier, _tier(entry, step, plain)), above=above, long=longer)
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
