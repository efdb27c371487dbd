"""What is held for a moment: it leaves together, in order, and none of it is lost."""

from __future__ import annotations

import asyncio

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
    for n in range(3, 200):
        batch.add(n)
    assert [len(entries) for entries in taken] == [2, 100]
    batch.flush()
    batch.flush()
    assert [n for entries in taken for n in entries] == list(range(1, 200))


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
