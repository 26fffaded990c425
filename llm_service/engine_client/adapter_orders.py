"""What each engine is told of adapters: a new one is told again of those that the one before had."""

from __future__ import annotations

import asyncio
from collections import Counter

from common.errors import TwinlensError
from llm_service.engine.messages import AdapterRead, DropAdapter, LoadAdapter

_TRIES = 10
"""How often an engine that lacks threads or memory is told once more of an adapter that the one before had."""


class AdapterOrders:
    """Adapters have numbers from 1 on, none of them twice."""

    def __init__(self) -> None:
        self._last = 0
        self._kept: dict[int, LoadAdapter] = {}
        self._asked: dict[int, tuple[LoadAdapter, asyncio.Future[AdapterRead]]] = {}
        self._awaited: set[int] = set()
        self._repeated: Counter[int] = Counter()

    @property
    def complete(self) -> bool:
        """The engine has said of each adapter that it was told again whether it has it."""
        return not self._awaited

    def load(self, path: str) -> tuple[LoadAdapter, asyncio.Future[AdapterRead]]:
        """What to tell the engine, and its answer."""
        self._last += 1
        message, answer = LoadAdapter(self._last, path), asyncio.get_running_loop().create_future()
        self._asked[message.id] = message, answer
        return message, answer

    def drop(self, number: int) -> DropAdapter:
        """What to tell the engine."""
        self._kept.pop(number, None)
        return DropAdapter(number)

    def keeps(self, number: int) -> bool:
        """Whether the engine is to have it."""
        return number in self._kept

    def again(self) -> list[LoadAdapter]:
        """What to tell an engine that has just begun; it serves when it is `complete`."""
        self._awaited, self._repeated = set(self._kept), Counter()
        return list(self._kept.values())

    def once_more(self, read: AdapterRead) -> LoadAdapter | None:
        """What to tell the engine again, a while after this answer, where an adapter that it was to have would be lost
        for a lack that may pass; None where it is no such answer, or has been one too often."""
        order = self._kept.get(read.id) if read.passing else None
        if order is None or self._repeated[read.id] == _TRIES:
            return None
        self._repeated[read.id] += 1
        return order

    def take(self, read: AdapterRead) -> bool:
        """Takes an answer in. False where an adapter is lost: it was there before, and this engine cannot have it. One
        that ends an engine while it is read is not told to the next."""
        if (asked := self._asked.pop(read.id, None)) is not None:
            message, answer = asked
            if not answer.done():  # else whoever asked has left, and the engine is to let go of it
                answer.set_result(read)
                if not read.error:
                    self._kept[read.id] = LoadAdapter(read.id, message.path, read.digest)
            return True
        self._awaited.discard(read.id)
        return not read.error or self._kept.pop(read.id, None) is None

    def engine_ended(self, error: TwinlensError) -> None:
        """Whoever waits for an answer gets this error."""
        for _, answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error)
        self._asked, self._awaited = {}, set()
