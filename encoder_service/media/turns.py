"""Who is served next by the decode processes: turns of items, and which process suits a job."""

from __future__ import annotations

import asyncio
from typing import Self

from common.processes import Child
from encoder_service.media.messages import FromDecoder


class Turn:
    """The right to one job of a lane, until `end` or the end of a `with` block, whichever comes first."""

    def __init__(self, lane: asyncio.Semaphore | None) -> None:
        self._lane = lane

    def end(self) -> None:
        """Gives it back, once."""
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class Idle:
    """Processes without a job, and which video each of them has open."""

    def __init__(self) -> None:
        self.children: list[Child[FromDecoder]] = []
        self._count = asyncio.Semaphore(0)
        self._open: dict[Child[FromDecoder], bytes] = {}

    def put(self, child: Child[FromDecoder]) -> None:
        """A process has nothing to do."""
        self.children.append(child)
        self._count.release()

    async def get(self, key: bytes) -> Child[FromDecoder]:
        """A process for a job: the one that has its content open, else one that has nothing open, else any."""
        await self._count.acquire()
        child = min(self.children, key=lambda child: (self._open.get(child) != key, child in self._open))
        self.children.remove(child)
        return child

    def opened(self, child: Child[FromDecoder], key: bytes) -> None:
        """A process now has this video open; with an empty key, none that is worth waiting for."""
        self._open.pop(child, None)
        if key:
            self._open[child] = key
