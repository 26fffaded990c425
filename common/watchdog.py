"""A block that is left with an error once a regular look at what it waits for finds one."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Watchdog(ABC):
    """While the block runs, `_look` is called every so many `seconds`; the first error that it gives ends the block."""

    def __init__(self, seconds: float) -> None:
        self._every = seconds
        self._limit = asyncio.timeout(None)
        self._found: Exception | None = None

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
        self._found = self._look(now - self._due)
        if self._found is None:
            self._look_later()
        else:
            self._limit.reschedule(now)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError:
            assert self._found is not None, "nothing else sets the limit"
            raise self._found from None
