"""Leases of ranges in the staging arena, first come, first served.

A lease takes all its ranges at once or waits for them, so no two waiters can each hold what the other needs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.aio import tasks
from common.errors import InvalidInput
from common.shm.arena import Range, RangeAllocator, SharedBuffer, aligned

_LARGE = 4 << 20
"""Smaller ranges are soon used again, and keep their memory."""


class StagingLease:
    """Ranges of one owner. `free` gives one back early; the rest go when the lease ends."""

    def __init__(self, staging: Staging, ranges: list[Range]) -> None:
        self._staging = staging
        self.ranges = ranges
        self._held = list(ranges)

    def free(self, span: Range) -> None:
        """Gives one range back."""
        self._held.remove(span)
        self._staging.give_back([span])

    def end(self) -> None:
        """Frees what is still held."""
        held, self._held = self._held, []
        self._staging.give_back(held)


class Staging:
    """The arena that encoded bytes and decoded pixels pass through on their way to a worker.

    The memory of ranges from `large` bytes on goes back to the system before others get them.
    """

    def __init__(self, buffer: SharedBuffer, *, large: int = _LARGE) -> None:
        self.buffer = buffer
        self._large = large
        self._ranges = RangeAllocator(buffer.size)
        self._waiters: deque[tuple[tuple[int, ...], asyncio.Future[list[Range]]]] = deque()
        self._emptying: set[asyncio.Task[None]] = set()

    @property
    def used(self) -> int:
        """Bytes that are leased, or on their way back to the system."""
        return self._ranges.used

    def check_size(self, *sizes: int) -> None:
        """Raises InvalidInput if ranges of these sizes can never be free together."""
        if sum(map(aligned, sizes)) > self._ranges.capacity:
            raise InvalidInput("the media does not fit the staging memory", reason="STAGING_TOO_SMALL")

    @asynccontextmanager
    async def lease(self, *sizes: int) -> AsyncIterator[StagingLease]:
        """Ranges of `sizes` bytes for the duration of the context. Waits its turn; cancelling leaves nothing behind.

        Raises InvalidInput if the sizes exceed the whole arena.
        """
        self.check_size(*sizes)
        lease = StagingLease(self, await self._take(sizes))
        try:
            yield lease
        finally:
            lease.end()

    def give_back(self, ranges: list[Range]) -> None:
        """Frees ranges, large ones after a thread has returned their memory, and serves waiters."""
        for span in ranges:
            if span.size < self._large:
                self._ranges.free(span)
                continue
            task = tasks.start(self._empty(span), "staging memory")
            self._emptying.add(task)
            task.add_done_callback(self._emptying.discard)
        self._serve()

    async def drain(self) -> None:
        """Returns when no range is being emptied."""
        while self._emptying:
            await asyncio.wait(self._emptying)

    def check_integrity(self) -> None:
        """Raises AssertionError if ranges overlap."""
        self._ranges.check_integrity()

    def check_idle(self) -> None:
        """The same, and if one is still leased."""
        self.check_integrity()
        assert self._ranges.used == 0, "a staging range was never given back"
        assert not self._waiters, "someone waits for an idle arena"

    async def _empty(self, span: Range) -> None:
        try:
            await tasks.in_thread(self.buffer.discard, span)
        finally:
            self._ranges.free(span)
            self._serve()

    async def _take(self, sizes: tuple[int, ...]) -> list[Range]:
        future: asyncio.Future[list[Range]] = asyncio.get_running_loop().create_future()
        self._waiters.append((sizes, future))
        self._serve()
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancel() and not future.cancelled():
                self.give_back(future.result())
            self._serve()
            raise

    def _serve(self) -> None:
        while self._waiters:
            sizes, future = self._waiters[0]
            if not future.done():
                if (ranges := self._allocate(sizes)) is None:
                    return
                future.set_result(ranges)
            self._waiters.popleft()

    def _allocate(self, sizes: tuple[int, ...]) -> list[Range] | None:
        taken: list[Range] = []
        for size in sizes:
            if (span := self._ranges.allocate(size)) is None:
                for other in taken:
                    self._ranges.free(other)
                return None
            taken.append(span)
        return taken
