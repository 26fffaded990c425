"""Several streams of one call, merged: what is ready goes first, and no stream runs far ahead of its reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

T = TypeVar("T")

_AHEAD = 4
"""Events of all streams together that may wait for the reader."""


class _Outbox(Generic[T]):
    """Events of running streams, and the ends of those that have run out."""

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


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Every event of every stream, in the order in which they come. Closing it closes all of them.

    Raises what a stream raises.
    """
    outbox: _Outbox[T] = _Outbox()
    tasks = [asyncio.create_task(_pump(stream, outbox)) for stream in streams]
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


async def _pump(stream: AsyncGenerator[T, None], outbox: _Outbox[T]) -> None:
    async with aclosing(stream):
        async for event in stream:
            await outbox.put(event)
