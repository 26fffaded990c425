"""Work that several callers want at the same time is done once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Work(Generic[T]):
    task: asyncio.Task[T]
    waiters: int = 0


class SingleFlight(Generic[KeyT, T]):
    """Work that is done once for all who want it at the same time; it is cancelled when the last of them has left."""

    def __init__(self) -> None:
        self.running: dict[KeyT, _Work[T]] = {}

    async def run(self, key: KeyT, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `work`, or of the same work that was begun for another caller."""
        one = self.running.get(key)
        if one is None:
            one = self.running[key] = _Work(asyncio.create_task(work()))
        one.waiters += 1
        try:
            return await asyncio.shield(one.task)
        finally:
            one.waiters -= 1
            if one.task.done() or not one.waiters:
                one.task.cancel()
                if self.running.get(key) is one:
                    del self.running[key]
