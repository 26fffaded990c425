"""Any crowd before any encoders that fill up: everybody gets in or leaves, and the line ends empty."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from time import monotonic

from hypothesis import given, settings
from hypothesis import strategies as st

from llm_service.encoders.wait_queue import Waiter, WaitQueue

HINT = 0.001


@dataclass
class Door:
    """An encoder as `Replica` keeps it: so many seats, of which others may take some and give them back."""

    seats: int
    taken: int = 0
    full_until: float = 0.0
    openings: int = 0

    @property
    def full(self) -> bool:
        return monotonic() < self.full_until and self.openings <= 0


@dataclass(frozen=True)
class Guest:
    """An item: how urgent it is, how many turns of the loop it stays, and after how many it is called off."""

    priority: int
    stays: int
    leaves_after: int | None


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def visit(line: WaitQueue, doors: list[Door], guest: Guest) -> None:
    place = Waiter(line, guest.priority)
    try:
        while True:
            await place.wait(lambda: doors, monotonic() + 600)
            door = next((each for each in doors if not each.full), doors[0])
            place.on_sending()
            door.openings -= 1
            try:
                await turns(2)  # the call, there and back
                if door.taken < door.seats:
                    door.taken += 1
                    place.leave()
                    try:
                        return await turns(guest.stays)
                    finally:
                        door.taken -= 1
            finally:
                door.openings += 1
                line.opened()
            door.full_until, door.openings = monotonic() + HINT, 0
    finally:
        place.leave()


guests = st.builds(Guest, st.integers(-1, 1), st.integers(0, 12), st.none() | st.integers(0, 40))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.lists(guests, max_size=16), st.integers(0, 2))
def test_everybody_gets_in_or_leaves_and_the_line_ends_empty(seats: list[int], crowd: list[Guest], others: int) -> None:
    async def run() -> None:
        line, doors = WaitQueue(), [Door(count) for count in seats]
        doors[0].taken = min(others, doors[0].seats)  # by callers of somebody else, who end without a word
        visits = [asyncio.create_task(visit(line, doors, guest)) for guest in crowd]

        async def call_off(task: asyncio.Task[None], after: int) -> None:
            await turns(after)
            task.cancel()

        leaving = [
            asyncio.create_task(call_off(task, guest.leaves_after))
            for task, guest in zip(visits, crowd, strict=True)
            if guest.leaves_after is not None
        ]
        await turns(20)
        doors[0].taken -= min(others, doors[0].seats)
        async with asyncio.timeout(180):
            ends = await asyncio.gather(*visits, return_exceptions=True)
            await asyncio.gather(*leaving)
        assert all(end is None or isinstance(end, asyncio.CancelledError) for end in ends)
        assert (len(line), line.head_was_sent) == (0, False)
        assert [door.taken for door in doors] == [0] * len(doors)

    asyncio.run(run())
