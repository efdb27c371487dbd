"""LiteLLM's table of prices, read as data: a file of JSON, some megabytes, whose entries become `Price`."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from router.prices import FREE, NAMES, SEARCHES, TIERS, Picture, Price, usd_of, written

_ABOVE = re.compile(r"(input_cost_per_token|output_cost_per_token|cache_read_input_token_cost)_above_(\d+)k_tokens$")
_SIZED = re.compile(r"(?:([^/]+)/)??(?:([a-z]+)/)?(\d+)-x-(\d+)/(.+)$")


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
    odd = plain.free and any(usd_of(usd) for key, usd in entry.items() if "cost" in key)
    return replace(plain, tiers=tiered, uncounted=odd)


def _ladder(entry: Mapping[str, object], tier: str) -> Price:
    """The prices of a service tier, by length of the prompt; what it has not of its own is as everywhere."""
    plain = _tier(entry, tier, _tier(entry, "", FREE))
    longer: Price | None = None
    above: int | None = None
    steps = _steps(entry)
    if steps:
        return _by_length(steps, plain)
    for bound in sorted({int(found[2]) for key in entry if (found := _ABOVE.match(key))}, reverse=True):
        step = f"_above_{bound}k_tokens"
        longer = replace(_tier(entry, step + tier, _tier(entry, step, plain)), above=above, long=longer)
        above = bound * 1000
    return replace(plain, above=above, long=longer)


def _steps(entry: Mapping[str, object]) -> list[tuple[float, Mapping[str, object]]]:
    """`tiered_pricing`: prices, each with the length of a prompt above which it holds; the longest first."""
    listed = entry.get("tiered_pricing")
    found = []
    for step in listed if isinstance(listed, list) else ():
        span = step.get("range") if isinstance(step, Mapping) else None
        if isinstance(span, list) and span and (least := usd_of(span[0])) is not None:
            found.append((least, step))
    return sorted(found, key=lambda step: -step[0])


def _by_length(steps: Iterable[tuple[float, Mapping[str, object]]], plain: Price) -> Price:
    price: Price | None = None
    above: int | None = None
    for least, step in steps:
        price = replace(_tier(step, "", plain), above=above, long=price)
        above = int(least)
    return price or plain


def _tier(entry: Mapping[str, object], suffix: str, base: Price) -> Price:
    """What the tier's keys say, over what `base` has."""
    said = {name: usd for name in NAMES if (usd := usd_of(entry.get(name + suffix))) is not None}
    return written(said, base, entry.get(SEARCHES + suffix))
