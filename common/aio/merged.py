"""Events of several senders in one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

T = TypeVar("T")

Send: TypeAlias = Callable[[T], Awaitable[None]]
"""Returns when there is room for the next event."""

_AHEAD = 4
"""Events of all senders together that may wait for the reader."""


class _Outbox(Generic[T]):
    """The events of senders, and their ends."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[T | asyncio.Task[None]] = asyncio.Queue()
        self._room = asyncio.Semaphore(_AHEAD)

    async def put(self, event: T) -> None:
        await self._room.acquire()
        self.events.put_nowait(event)

    async def get(self) -> T | asyncio.Task[None]:
        event = await self.events.get()
        if not isinstance(event, asyncio.Task):
            self._room.release()
        return event

    def clear(self) -> None:
        """Drops everything once nobody reads: a cancelled task keeps its frames, which refer to this."""
        self.events = asyncio.Queue()


async def merged(senders: Sequence[Callable[[Send[T]], Coroutine[Any, Any, None]]]) -> AsyncGenerator[T, None]:
    """All events of the senders: whatever is ready goes first, and no sender runs far ahead of the reader. Closing it
    cancels the senders.

    Raises the error of a sender.
    """
    outbox: _Outbox[T] = _Outbox()
    tasks = [asyncio.create_task(sender(outbox.put)) for sender in senders]
    for task in tasks:
        task.add_done_callback(outbox.events.put_nowait)
    try:
        running = len(tasks)
        while running:
            event = await outbox.get()
            if isinstance(event, asyncio.Task):
                event.result()
                running -= 1
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        outbox.clear()
