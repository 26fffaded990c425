"""A context that ends with an error when regular checks find one."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

LOOKS = 3
"""Consecutive checks that must find the same kind of error. A message that arrived before the first of them is read at
the end of the loop's turn, and taken into account in the next. An immediate verdict would take a process that has just
answered for silent: on a busy machine, a turn takes longer than answering."""


class Watchdog(ABC):
    """While the context is active, `_look` is called every `seconds`; an error that `LOOKS` consecutive calls return
    ends it."""

    def __init__(self, seconds: float) -> None:
        self._every = seconds
        self._limit = asyncio.timeout(None)
        self._found: Exception | None = None
        self._times = 0

    @abstractmethod
    def _look(self, late: float) -> Exception | None:
        """Why the context must end, None if it may go on; called `late` seconds after it was due."""

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
