"""Orders to the engine about adapters; a new engine is given the adapters that the one before had."""

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
        """The message that loads an adapter, and a future of its answer."""
        self._last += 1
        message, answer = LoadAdapter(self._last, path), asyncio.get_running_loop().create_future()
        self._asked[message.id] = message, answer
        return message, answer

    def drop(self, number: int) -> DropAdapter:
        """The message that drops an adapter."""
        self._kept.pop(number, None)
        return DropAdapter(number)

    def keeps(self, number: int) -> bool:
        """Whether the engine should have this adapter."""
        return number in self._kept

    def again(self) -> list[LoadAdapter]:
        """The messages for an engine that has just started, which serves when it is `complete`."""
        self._awaited, self._repeated = set(self._kept), Counter()
        return list(self._kept.values())

    def once_more(self, read: AdapterRead) -> LoadAdapter | None:
        """The message to repeat a while after this answer: for an adapter that the engine should have, and could not
        load for want of threads or memory. None for other answers, or after too many attempts."""
        order = self._kept.get(read.id) if read.passing else None
        if order is None or self._repeated[read.id] == _TRIES:
            return None
        self._repeated[read.id] += 1
        return order

    def take(self, read: AdapterRead) -> bool:
        """Takes an answer. Returns False if an adapter is lost: an earlier engine had it and this one cannot load it.
        An adapter that ended the engine while it was read is not given to the next."""
        if (asked := self._asked.pop(read.id, None)) is not None:
            message, answer = asked
            if not answer.done():  # else the caller has left, and the engine should drop it
                answer.set_result(read)
                if not read.error:
                    self._kept[read.id] = LoadAdapter(read.id, message.path, read.digest)
            return True
        self._awaited.discard(read.id)
        return not read.error or self._kept.pop(read.id, None) is None

    def engine_ended(self, error: TwinlensError) -> None:
        """Fails all pending answers with this error."""
        for _, answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error)
        self._asked, self._awaited = {}, set()
