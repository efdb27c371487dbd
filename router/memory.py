"""What a router does to stay small: fewer walks of the collector, one arena of malloc's, and bursts given back."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc

_M_ARENA_MAX = -8
"""`mallopt`'s parameter, from glibc's malloc.h."""
_EVERY_S = 2.0


def spare() -> None:
    """What a request leaves behind is counted, not traced: look for cycles less often, yet before they add up.

    The audit's thread and its like allocate little; an arena of malloc's for each would only be held on to.
    """
    gc.set_threshold(2000, 20, 20)
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


async def give_back_for_ever() -> None:
    """Hand free pages back now and then: malloc by itself keeps what a burst, or a slow disk under the audit log, took.

    It takes 1 ms for 20 MB, and takes it on the loop: in a thread it would hold the lock that the loop's malloc wants.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # another C library than glibc
        return
    while True:
        await asyncio.sleep(_EVERY_S)
        trim(0)
