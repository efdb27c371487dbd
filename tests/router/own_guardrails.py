"""Guardrails that tests name in YAML."""

from __future__ import annotations

import asyncio
import sys
import time

from router.guardrails import Blocked, Content


class Words:
    """Blocks or replaces words, at either stage."""

    def __init__(self, block: str = "", replace: str = "", by: str = "[gone]") -> None:
        self.block, self.replace, self.by = block, replace, by

    async def check(self, content: Content) -> list[str] | None:
        if self.block and any(self.block in text for text in content.texts):
            raise Blocked(f"{content.stage} may not say that.")
        if not self.replace:
            return None
        return [text.replace(self.replace, self.by) for text in content.texts]


class Waits:
    """Not async, and slow."""

    def check(self, content: Content) -> None:
        time.sleep(0.05)


class Breaks:
    """Fails in every way that a check can."""

    def __init__(self, how: str) -> None:
        self.how = how

    async def check(self, content: Content) -> list[str] | None:
        match self.how:
            case "raises":
                raise KeyError("secret-detail")
            case "hangs":
                await asyncio.sleep(60)
            case "too few":
                return []
            case "no texts":
                return [None for _ in content.texts]  # type: ignore[misc]
            case "one text":
                return "x" * len(content.texts)  # type: ignore[return-value]
            case "exits":
                sys.exit(3)
            case "cancels":
                raise asyncio.CancelledError
        return None
