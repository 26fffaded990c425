"""Stand-ins for the processes of the encoder service: they answer when, and as, a test tells them to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

from common.media.item import Modality
from common.process.children import ChildDied
from encoder_service.engine.batching import Unit
from encoder_service.engine.dispatch import BatchLimits, Dispatcher
from encoder_service.engine.workers import WorkerTimes
from encoder_service.item import Inspection
from encoder_service.media.decoder import TimeBudget
from encoder_service.worker.messages import Batch, BatchDone, Piece, WorkerReady, WorkerSettings

LIMITS = BatchLimits(budget=100, max_units=8, seconds=60.0, patience=60.0)
TIMES = WorkerTimes(60.0)
SETTINGS = WorkerSettings(folder="", device="cpu", dtype="float32", threads=1, staging_bytes=0, store_bytes=0)
DONE = BatchDone(not_finite=[], preprocess_seconds=0.0, vit_seconds=0.0)


class FakeChild:
    """One worker process. With `answers` it replies to each batch by itself, else when the test calls `say`."""

    def __init__(self, answers: Callable[[Batch], Any] | None = None, ready: WorkerReady | None = None) -> None:
        self._answers = answers
        self._ready = ready or WorkerReady()
        self._said: asyncio.Queue[Any] = asyncio.Queue()
        self.batches: list[Batch] = []
        self.alive = True

    def send(self, message: Any) -> None:
        if not self.alive:
            return
        if isinstance(message, WorkerSettings):
            self.say(self._ready)
            return
        self.batches.append(message)
        if self._answers:
            self.say(self._answers(message))

    def say(self, message: Any) -> None:
        self._said.put_nowait(message)

    def kill(self) -> None:
        if self.alive:
            self.alive = False
            self.say(ChildDied("killed"))

    async def receive(self) -> Any:
        message = await self._said.get()
        if isinstance(message, ChildDied):
            self.alive = False
            raise message
        return message

    async def stacks(self) -> dict[str, str]:
        return {}

    async def post_mortem(self) -> dict[str, str]:
        self.kill()
        return {}

    async def stop(self, grace: float = 5.0) -> None:
        self.alive = False


class FakeDecoders:
    """A decode pool that takes `turns` turns of the loop for each job, and may raise."""

    def __init__(self, seen: Inspection, *, turns: int = 1, failure: Exception | None = None) -> None:
        self.seen = seen
        self.turns = turns
        self.failure = failure
        self.jobs = 0
        self.processes = SimpleNamespace(restarts=0)
        self.time_budgets: list[TimeBudget] = []
        self._videos = asyncio.Semaphore(1)

    async def turn(self, modality: Modality, size: int, caller: object) -> ExitStack:
        turn = ExitStack()
        if modality is Modality.VIDEO:
            await self._videos.acquire()
            turn.callback(self._videos.release)
        return turn

    def time_budget(self) -> TimeBudget:
        return TimeBudget(60.0)

    async def inspect(
        self, data: Any, *, key: bytes, modality: Modality, field: str, time_budget: TimeBudget, with_sound: bool
    ) -> Inspection:
        self.time_budgets.append(time_budget)
        await self._work()
        return self.seen

    async def decode(
        self,
        data: Any,
        pixels: Any,
        plan: Any,
        *,
        key: bytes,
        modality: Modality,
        field: str,
        on_frames: Any,
        time_budget: TimeBudget,
    ) -> None:
        self.time_budgets.append(time_budget)
        await self._work()

    async def _work(self) -> None:
        self.jobs += 1
        for _ in range(self.turns):
            await asyncio.sleep(0)
        if self.failure:
            raise self.failure


def submit(dispatcher: Dispatcher, key: bytes, patches: int = 10, at: int = 0, group: int = 0) -> Unit:
    piece = Piece(
        modality="image", pixels=at, frames=1, height=1, width=1, resized=(1, 1), grid=(1, 1, 1), tokens=1, rows=0
    )
    return dispatcher.submit(key, piece, patches, 0, group)


def marks(child: FakeChild) -> list[list[int]]:
    return [[piece.pixels for piece in batch.pieces] for batch in child.batches]


async def served(worker: FakeChild, waiting: Iterable[asyncio.Task[Any]]) -> list[Any]:
    """Answers whatever the worker is given until everyone who waits has been served; returns what they got."""
    together = asyncio.gather(*waiting)
    while not together.done():
        if worker.batches:
            worker.batches.clear()
            worker.say(DONE)
        await turns(1)
    return await together


async def turns(count: int = 10) -> None:
    """Lets everything that can go on do so."""
    for _ in range(count):
        await asyncio.sleep(0)
