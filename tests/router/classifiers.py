"""Classifiers as tenants bring them: right ones, and some that fail."""

from __future__ import annotations

import asyncio
import threading
from typing import Any


class Marked:
    """Says that what holds the word `kim` is personal; everything else is public."""

    def __init__(self, word: str = "kim") -> None:
        self._word = word

    async def classify(self, body: dict[str, Any]) -> dict[str, str]:
        await asyncio.sleep(0)
        return {"data": "personal" if self._word in str(body["messages"]) else "public"}


class Threaded(Marked):
    """The same, in a thread."""

    def classify(self, body: dict[str, Any]) -> dict[str, str]:  # type: ignore[override]
        assert threading.current_thread() is not threading.main_thread()
        return {"data": "personal" if self._word in str(body["messages"]) else "public", "mood": "good"}


class Broken:
    async def classify(self, body: dict[str, Any]) -> dict[str, str]:
        raise RuntimeError(str(body))


class Odd:
    """Answers in values that nobody listed."""

    async def classify(self, body: dict[str, Any]) -> dict[str, str]:
        return {"data": "unheard-of"}


class Late:
    async def classify(self, body: dict[str, Any]) -> dict[str, str]:
        await asyncio.sleep(60)
        return {"data": "public"}
