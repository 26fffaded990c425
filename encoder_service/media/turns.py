"""Who is served next by the decode processes: turns of items, and which process suits a job."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Self

from common.errors import TwinlensError
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
    """Processes without a job, which video each of them has open, and the jobs that wait for one, in their order."""

    def __init__(self) -> None:
        self._children: list[Child[FromDecoder]] = []
        self._open: dict[Child[FromDecoder], bytes] = {}
        self._waiting: deque[tuple[bytes, asyncio.Future[Child[FromDecoder]]]] = deque()

    def put(self, child: Child[FromDecoder]) -> None:
        """A process has nothing to do."""
        self._children.append(child)
        self._serve()

    async def get(self, key: bytes) -> Child[FromDecoder]:
        """A process for a job: the one that has its content open, else one that has nothing open, else any. Raises what
        `fail` is told meanwhile."""
        future: asyncio.Future[Child[FromDecoder]] = asyncio.get_running_loop().create_future()
        self._waiting.append((key, future))
        self._serve()
        try:
            return await future
        except asyncio.CancelledError:
            if not (future.cancel() or future.cancelled() or future.exception()):
                self.put(future.result())
            raise

    def fail(self, error: TwinlensError) -> None:
        """No process is there, and none will be soon: who waits for one is told."""
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()

    def opened(self, child: Child[FromDecoder], key: bytes) -> None:
        """A process now has this video open; with an empty key, none that is worth waiting for."""
        self._open.pop(child, None)
        if key:
            self._open[child] = key

    def _serve(self) -> None:
        while self._children and self._waiting:
            key, future = self._waiting.popleft()
            if not future.done():
                child = min(self._children, key=lambda child: (self._open.get(child) != key, child in self._open))
                self._children.remove(child)
                future.set_result(child)
