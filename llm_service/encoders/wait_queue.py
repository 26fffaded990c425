"""Items that wait for room while every encoder is full: by priority, then by arrival, and only the first one asks.

Each attempt sends an item's content again, so waiters do not try in turns: the first goes when one of our streams has
ended, or when the time that an encoder named is over; the next one follows once that was admitted.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol

_PASS_ON_SECONDS = 0.1
"""A full encoder says so at once. If it has not done so within this time, it has admitted the item, whatever it says
later."""


class MayBeFull(Protocol):
    """An encoder, as far as waiters are concerned."""

    @property
    def full(self) -> bool:
        """It has no room, as far as is known."""
        ...

    @property
    def full_until(self) -> float:
        """When it is to be asked again, at the latest; monotonic seconds."""
        ...


class WaitQueue:
    """All waiters. `opened` is to be called when there may be room somewhere; `head_was_sent`: the first one was sent
    and may still be refused; `head_may_go`: it could be sent, and only has to wake up."""

    def __init__(self) -> None:
        self.room = asyncio.Event()
        self.head_was_sent = False
        self.head_may_go: Callable[[], bool] = _nobody
        self._has_head = False
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        """How many wait, the first one included."""
        return self._has_head + sum(not turn.done() for _, _, turn in self._waiting)

    def opened(self) -> None:
        """An encoder may have room again."""
        self.room.set()

    async def come_first(self, priority: int) -> None:
        """Waits for the caller's turn, which it must end by `pass_on`."""
        if not self._has_head:
            self._has_head = True
            return
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (-priority, next(self._arrivals), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it came at that very moment
                self.pass_on()
            raise

    def pass_on(self) -> None:
        """Ends the turn of the first."""
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._has_head = False


class Waiter:
    """One item's place in the queue, taken when it has to wait first; then it `is_waiting`. Its creator leaves it."""

    def __init__(self, queue: WaitQueue, priority: int) -> None:
        self.is_waiting = False
        self._queue = queue
        self._priority = priority
        self._first = False
        self._passing: asyncio.TimerHandle | None = None

    async def wait(
        self, encoders: Callable[[], Sequence[MayBeFull]], until: float, on_wait: Callable[[], None] = lambda: None
    ) -> None:
        """Waits until one of the encoders may have room, usually not at all, and the first in the queue, if there is
        one, is not on its way there. `on_wait` is called before waiting.

        Raises TimeoutError at `until`, in monotonic seconds. An item that is refused again waits again, and is still
        the first.
        """
        queue = self._queue
        self._stop_passing()
        if not (queue.head_was_sent or queue.head_may_go()) and not _are_full(encoders()):
            return
        self.is_waiting = True
        try:
            on_wait()
            async with asyncio.timeout_at(until):
                await self._come_to_room(encoders)
        finally:
            self.is_waiting = False

    async def _come_to_room(self, encoders: Callable[[], Sequence[MayBeFull]]) -> None:
        queue = self._queue
        if not self._first:
            await queue.come_first(self._priority)
            self._first = True
        queue.head_may_go = lambda: not _are_full(encoders())
        try:
            while _are_full(asked := encoders()):
                queue.room.clear()
                soonest = min(encoder.full_until for encoder in asked)
                await _first_of(queue.room, soonest - monotonic())
        finally:
            queue.head_may_go = _nobody

    def on_sending(self) -> None:
        """The item is being sent: unless it is refused at once, it is the next one's turn."""
        if self._first and self._passing is None:
            self._queue.head_was_sent = True
            self._passing = asyncio.get_running_loop().call_later(_PASS_ON_SECONDS, self.leave)

    def leave(self) -> None:
        """Ends the turn, or the waiting for it; a second time is of no account."""
        self._stop_passing()
        if self._first:
            self._first = False
            self._queue.pass_on()

    def _stop_passing(self) -> None:
        if self._passing is not None:
            self._passing.cancel()
            self._passing = None
            self._queue.head_was_sent = False


def _nobody() -> bool:
    return False


async def _first_of(event: asyncio.Event, seconds: float) -> None:
    """Waits until the event is set, or for so many seconds."""
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
    except TimeoutError:
        return


def _are_full(encoders: Sequence[MayBeFull]) -> bool:
    """Whether it is room that is wanting, and not encoders."""
    return bool(encoders) and all(encoder.full for encoder in encoders)
