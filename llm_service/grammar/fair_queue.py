"""Shares few processes among several callers: they take turns, however much one of them asks for."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Things that callers take in turns, each caller's requests in their own order; a caller has at most
    `max_held` of them at a time. A thing is here from `put` until `get`."""

    def __init__(self, max_held: int) -> None:
        self._max_held = max_held
        self._here: deque[T] = deque()
        self._lines: OrderedDict[str, deque[asyncio.Future[T]]] = OrderedDict()
        self._held: Counter[str] = Counter()

    def put(self, thing: T) -> None:
        """One is free, or free again."""
        self._here.append(thing)
        self._serve()

    async def get(self, caller: str) -> T:
        """One that this caller holds from now on, until `leave`."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(caller, deque()).append(future)
        self._serve()
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancel() and not future.cancelled():
                self._here.appendleft(future.result())
                self.leave(caller)
            raise

    def leave(self, caller: str) -> None:
        """This caller holds one thing less."""
        self._held[caller] -= 1
        if not self._held[caller]:
            del self._held[caller]
        self._serve()

    def _serve(self) -> None:
        while self._here and (caller := self._next()) is not None:
            future = self._lines[caller].popleft()
            self._lines.move_to_end(caller)
            self._tidy(caller)
            self._held[caller] += 1
            future.set_result(self._here.popleft())

    def _next(self) -> str | None:
        """The caller who has waited longest among those who may have a turn."""
        for caller in list(self._lines):
            self._tidy(caller)
            if caller in self._lines and self._held[caller] < self._max_held:
                return caller
        return None

    def _tidy(self, caller: str) -> None:
        """Removes callers who have left from the front of the line, and the line if it is empty."""
        line = self._lines[caller]
        while line and line[0].done():
            line.popleft()
        if not line:
            del self._lines[caller]
