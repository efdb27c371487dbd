"""Names with stars: whether a model's name fits one, and what stands for its stars. Knows no configuration."""

from __future__ import annotations

from collections.abc import Iterable

STAR = "*"
MOST = 512
"""Characters: a longer name fits no wildcard."""


def parts(pattern: str, name: str) -> tuple[str, ...] | None:
    """What each star stands for, the first for as much as possible; None where the name does not fit.

    In time that grows with the name's length, whatever it holds.
    """
    first, *literals = pattern.split(STAR)
    if not literals:
        return () if name == pattern else None
    last = literals.pop()
    end = len(name) - len(last)
    if len(name) > MOST or end < len(first) or not name.startswith(first) or not name.endswith(last):
        return None
    found: list[str] = []
    for literal in reversed(literals):
        at = name.rfind(literal, len(first), end)
        if at < 0:
            return None
        found.append(name[at + len(literal) : end])
        end = at
    return (name[len(first) : end], *reversed(found))


def filled(template: str, pattern: str, name: str) -> str:
    """The name that a deployment is asked for: `template` with its stars filled, in order.

    As in LiteLLM, a template with fewer stars than the pattern, but some, takes the name as it is.
    """
    if STAR not in template:
        return template
    found = parts(pattern, name)
    if not found:
        return template
    if len(found) > template.count(STAR):
        return name
    pieces = template.split(STAR)
    stand_in = (*found, *[STAR] * (len(pieces) - 1 - len(found)))
    return pieces[0] + "".join(part + piece for part, piece in zip(stand_in, pieces[1:], strict=True))


def narrowest(names: Iterable[str]) -> tuple[str, ...]:
    """Those with stars, the longest first: the one that says most holds."""
    return tuple(sorted((name for name in names if STAR in name), key=len, reverse=True))
