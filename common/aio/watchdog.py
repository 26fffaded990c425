"""A block that is left with an error once regular looks at what it waits for find one."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

LOOKS = 3
"""Looks in a row that must find an error of one kind. A word that came before the first of them is read at the end of
this loop's turn, and heard in the next one. Who judged at once would take what has just spoken for silent: on a busy
machine a turn takes longer than it takes to say something and fall asleep."""


class Watchdog(ABC):
    """While the block runs, `_look` is called every so many `seconds`; the error that `LOOKS` of them in a row give
    ends the block."""

    def __init__(self, seconds: float) -> None:
        self._every = seconds
        self._limit = asyncio.timeout(None)
        self._found: Exception | None = None
        self._times = 0

    @abstractmethod
    def _look(self, late: float) -> Exception | None:
        """Why the block is to be left, None while it may go on; this loop calls it `late` seconds after its time."""

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        self._loop = asyncio.get_running_loop()
        self._look_later()
        return self

    def _look_later(self) -> None:
        self._due = self._loop.time() + self._every
        self._timer = self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        now = self._loop.time()
        before, self._found = self._found, self._look(now - self._due)
        if self._found is None:
            self._times = 0
        else:
            self._times = self._times + 1 if type(self._found) is type(before) else 1
        if self._times == LOOKS:
            self._limit.reschedule(now)
        else:
            self._look_later()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError:
            assert self._found is not None, "nothing else sets the limit"
            raise self._found from None
