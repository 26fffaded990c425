"""Looks at what a block waits for: how many count, and what is heard between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from common.aio.watchdog import LOOKS, Watchdog


class Lost(Exception):
    pass


class Slow(Exception):
    pass


class Looking(Watchdog):
    def __init__(self, look: Callable[[], Exception | None]) -> None:
        super().__init__(0.001)
        self._found_by = look

    def _look(self, late: float) -> Exception | None:
        return self._found_by()


async def left(found: list[Exception | None]) -> int:
    """How many of these looks it takes."""
    count = 0

    def look() -> Exception | None:
        nonlocal count
        count += 1
        return found[count - 1]

    with pytest.raises((Lost, Slow)) as error:
        async with Looking(look):
            await asyncio.get_running_loop().create_future()
    assert error.value is found[count - 1]
    return count


async def test_an_error_counts_when_it_is_found_several_times_in_a_row() -> None:
    few: list[Exception | None] = [Lost() for _ in range(LOOKS - 1)]
    many: list[Exception | None] = [Lost() for _ in range(LOOKS)]
    assert await left([*many, None]) == LOOKS
    assert await left([*few, None, *many]) == 2 * LOOKS
    assert await left([*few, *map(Slow, range(LOOKS))]) == 2 * LOOKS - 1, "each kind for itself"


async def test_what_is_said_while_it_is_looked_for_is_heard_before_it_counts() -> None:
    """However long a turn of the loop takes: here the next look is due before each of them ends."""
    reader, looks = asyncio.StreamReader(), 0
    loop = asyncio.get_running_loop()

    def look() -> Exception | None:
        nonlocal looks
        looks += 1
        if looks == 1:
            loop.call_soon(reader.feed_data, b"\n")  # as from a socket
        end = loop.time() + 0.002
        while loop.time() < end:
            pass
        return Lost()

    async with Looking(look):
        assert await reader.readline() == b"\n"
    assert looks
