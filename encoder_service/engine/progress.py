"""The progress of an item: rows and frames so far, and its stages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

from common.telemetry.stages import Stage, add


class Progress:
    """A counter of progress: decoded frames, or arrived rows. A failure is final."""

    def __init__(self) -> None:
        self.count = 0
        self._error: BaseException | None = None
        self._waiters: set[asyncio.Future[None]] = set()

    def advance(self, count: int) -> None:
        """Raises the count; a smaller value changes nothing."""
        if count > self.count:
            self.count = count
            self._wake()

    def fail(self, error: BaseException) -> None:
        """Fails: the count rises no further."""
        self._error = self._error or error
        self._wake()

    def follow(self, task: asyncio.Task[int]) -> None:
        """Ends with a task: at the count that the task returns, or with its error."""
        if task.cancelled():
            self.fail(asyncio.CancelledError())
        elif error := task.exception():
            self.fail(error)
        else:
            self.advance(task.result())

    async def reach(self, count: int) -> None:
        """Waits for this count; raises the error if it fails before."""
        while self.count < count:
            if self._error is not None:
                raise self._error
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(future)
            try:
                await future
            finally:
                self._waiters.discard(future)

    def _wake(self) -> None:
        for future in self._waiters:
            if not future.done():
                future.set_result(None)


class StageTimes:
    """The current stage of an item, and its stages so far; their seconds are added to `totals` too."""

    def __init__(self, stage: str, totals: MutableMapping[str, float]) -> None:
        self.stage = stage
        self.stages: dict[str, Stage] = {}
        self._totals = totals

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """The block is this stage."""
        started, self.stage = time.perf_counter(), stage
        try:
            yield
        finally:
            self.add(stage, Stage.between(started, time.perf_counter()))

    def add(self, name: str, stage: Stage) -> None:
        """Adds seconds to a stage."""
        add(self.stages, name, stage)
        self._totals[name] = self._totals.get(name, 0.0) + stage.seconds
