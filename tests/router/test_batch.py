"""What is held for a moment: it leaves together, in order, and none of it is lost."""

from __future__ import annotations

import asyncio

import pytest

from router.batch import Batch


async def test_entries_are_held_for_a_moment_and_none_is_lost() -> None:
    """On a running loop entries leave together, when they are many or after a moment, in the order they came."""
    taken: list[list[int]] = []
    batch: Batch[int] = Batch(taken.append, most=100, held_s=0.02)
    batch.add(1)
    batch.add(2)
    assert taken == []
    async with asyncio.timeout(10):
        while not taken:
            await asyncio.sleep(0.01)
    many: Batch[int] = Batch(taken.append, most=100, held_s=60)
    for n in range(3, 200):
        many.add(n)
        if n % 10 == 0:
            await asyncio.sleep(0)
    assert [len(entries) for entries in taken] == [2, 108]
    many.flush()
    many.flush()
    assert [n for entries in taken for n in entries] == list(range(1, 200))


async def test_what_fails_with_an_entry_is_not_told_to_who_added_the_next(caplog: pytest.LogCaptureFixture) -> None:
    """The last of many entries, with which all leave, is added without a fault of the others; the fault is logged."""

    def refuse(entries: list[int]) -> None:
        raise ValueError(f"{len(entries)} entries")

    batch: Batch[int] = Batch(refuse, most=3, held_s=60)
    for n in range(3):
        batch.add(n)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert "ValueError: 3 entries" in caplog.text


def test_entries_held_by_a_loop_that_ended_leave_with_the_next() -> None:
    """A loop that closes with entries in hand costs none of them."""
    taken: list[list[bytes]] = []
    batch: Batch[bytes] = Batch(taken.append, most=100, held_s=0.02)

    async def add(entry: bytes) -> None:
        batch.add(entry)

    asyncio.run(add(b"one"))
    assert taken == []
    batch.add(b"two")
    assert taken == [[b"one", b"two"]]
