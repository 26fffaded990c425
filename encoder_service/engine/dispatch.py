"""The device workers: batches go out to whichever is idle; one that dies is replaced, and its work goes elsewhere.

A unit's future is settled only when no worker can write its rows any more, so that its owner may then give its memory
back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common import log
from common.errors import Internal, TwinlensError, Unavailable
from common.processes import Child, ChildDied
from encoder_service.engine.batching import Unit, assemble
from encoder_service.engine.suspects import Suspects
from encoder_service.worker.messages import (
    Batch,
    BatchDone,
    BatchFailed,
    Begin,
    Failed,
    FromWorker,
    Piece,
    Ready,
)

MODULE = "encoder_service.worker"
_LONGEST_PAUSE = 30.0

_log = log.get("workers")


class WorkerError(Exception):
    """A worker cannot start; the message says why, for the operator."""


@dataclass(slots=True, eq=False)
class Slot:
    """The place of one worker: the process that is in it now, and the batch that it computes."""

    index: int
    child: Child[FromWorker] | None = None
    batch: list[Unit] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class Counters:
    """Totals since start."""

    vit_calls: int = 0
    vit_patches: int = 0
    preprocess_seconds: float = 0.0
    vit_seconds: float = 0.0


class Dispatcher:
    """Runs units on `begins`, one worker each. `start` and `stop` are its owner's.

    `on_change` is called whenever the number of live workers changes.
    """

    def __init__(
        self,
        begins: Sequence[Begin],
        fds: tuple[int, int],
        *,
        budget: int,
        most_units: int,
        seconds: float,
        on_change: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._begins = begins
        self._fds = fds
        self._budget = budget
        self._most_units = most_units
        self._seconds = seconds
        self._on_change = on_change
        self._slots = [Slot(index) for index in range(len(begins))]
        self._waiting: list[Unit] = []
        self._suspects = Suspects()
        self._keepers: list[asyncio.Task[None]] = []
        self._number = 0
        self._pumping = False
        self.counters = Counters()

    async def start(self) -> None:
        """Starts every worker; raises WorkerError where one cannot."""
        await asyncio.gather(*(self._start(slot) for slot in self._slots))
        self._keepers = [asyncio.create_task(self._keep(slot)) for slot in self._slots]
        self._on_change(self.alive)

    async def stop(self) -> None:
        """Ends every worker, fails what was left, and returns when the processes are gone."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        children = [slot.child for slot in self._slots if slot.child is not None]
        for child in children:
            child.kill()
        await asyncio.gather(*(child.stop(grace=1.0) for child in children))
        for slot in self._slots:
            slot.child = None
            self._fail(self._take_batch(slot), Unavailable("the service is stopping", reason="STOPPING"))
        self._fail(self._drop_waiting(), Unavailable("the service is stopping", reason="STOPPING"))

    @property
    def alive(self) -> int:
        """Workers that can compute."""
        return sum(slot.child is not None for slot in self._slots)

    @property
    def devices(self) -> list[str]:
        """Where each worker computes."""
        return [begin.device for begin in self._begins]

    @property
    def waiting(self) -> Sequence[Unit]:
        """Units that no worker has."""
        return self._waiting

    @property
    def running(self) -> list[Unit]:
        """Units that a worker has."""
        return [unit for slot in self._slots for unit in slot.batch]

    def check(self, key: bytes) -> None:
        """Raises where an item cannot be computed: it ends workers, or there is none."""
        if self._suspects.is_poison(key):
            raise _poison()
        if not self.alive:
            raise _no_worker()

    def submit(self, key: bytes, piece: Piece, patches: int, priority: int) -> Unit:
        """Queues a unit. `done` raises Unavailable where every worker died, Internal where it cannot be computed."""
        self.check(key)
        self._number += 1
        unit = Unit(
            key,
            piece,
            patches,
            priority,
            self._number,
            asyncio.get_running_loop().create_future(),
            alone=self._suspects.has(key),
        )
        self._waiting.append(unit)
        self._pump_soon()
        return unit

    def withdraw(self, unit: Unit) -> bool:
        """Takes a unit back that no worker has; False where one has it."""
        if unit not in self._waiting:
            return False
        self._waiting.remove(unit)
        unit.done.cancel()
        return True

    def _pump_soon(self) -> None:
        """Sends batches at the end of this turn of the loop, so that what comes together goes together."""
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        idle = [slot for slot in self._slots if slot.child is not None and not slot.batch]
        batches = assemble(self._waiting, len(idle), self._budget, self._most_units)
        for slot, batch in zip(idle, batches, strict=False):
            assert slot.child is not None
            for unit in batch:
                self._waiting.remove(unit)
                unit.started_at = unit.started_at or time.perf_counter()
                unit.attempts += 1
            slot.batch = batch
            slot.timer = asyncio.get_running_loop().call_later(self._seconds, slot.child.kill)
            slot.child.send(Batch([unit.piece for unit in batch]))

    async def _start(self, slot: Slot) -> None:
        child: Child[FromWorker] = await Child.start(MODULE, receives=FromWorker, fds=self._fds)
        try:
            child.send(self._begins[slot.index])
            answer = await child.receive()
        except BaseException:
            child.kill()
            await child.stop(grace=1.0)
            raise
        if isinstance(answer, Ready):
            slot.child = child
            return
        await child.stop(grace=1.0)
        raise WorkerError(answer.why if isinstance(answer, Failed) else "a worker did not start")

    async def _keep(self, slot: Slot) -> None:
        """Reads what a worker says for as long as it lives, and replaces it when it does not."""
        while True:
            assert slot.child is not None
            try:
                while True:
                    self._settle(slot, await slot.child.receive())
                    self._pump()
            except ChildDied as death:
                _log.error("a worker died", worker=slot.index, why=str(death), units=len(slot.batch))
            await self._bury(slot)
            await self._revive(slot)

    async def _bury(self, slot: Slot) -> None:
        child, slot.child = slot.child, None
        assert child is not None
        child.kill()
        await child.stop(grace=1.0)
        batch = self._take_batch(slot)
        self._on_change(self.alive)
        lost: list[Unit] = []
        self._suspects.blame(unit.key for unit in batch)
        for unit in batch:
            if self.alive and unit.attempts < 2:
                unit.alone = True
                self._waiting.append(unit)
            else:
                lost.append(unit)
        for unit in lost:
            self._fail([unit], _poison() if self._suspects.is_poison(unit.key) else _no_worker())
        if not self.alive:
            self._fail(self._drop_waiting(), _no_worker())
        self._pump_soon()

    async def _revive(self, slot: Slot) -> None:
        pause = 0.0
        while slot.child is None:
            await asyncio.sleep(pause)
            pause = min(max(1.0, 2 * pause), _LONGEST_PAUSE)
            try:
                await self._start(slot)
            except (ChildDied, WorkerError, OSError) as error:
                _log.error("a worker does not start", worker=slot.index, why=str(error), retry_seconds=pause)
        _log.info("a worker is back", worker=slot.index)
        self._on_change(self.alive)
        self._pump_soon()

    def _settle(self, slot: Slot, answer: FromWorker) -> None:
        batch = self._take_batch(slot)
        match answer:
            case BatchDone():
                self.counters.vit_calls += 1
                self.counters.vit_patches += sum(unit.patches for unit in batch)
                self.counters.preprocess_seconds += answer.preprocess_seconds
                self.counters.vit_seconds += answer.vit_seconds
                for index, unit in enumerate(batch):
                    self._suspects.clear(unit.key)
                    if index in answer.not_finite:
                        self._fail([unit], Internal("the rows are not finite", reason="ROWS_NOT_FINITE"))
                    elif not unit.done.done():
                        unit.done.set_result(None)
            case BatchFailed():
                _log.error("a batch failed", worker=slot.index, why=answer.why, units=len(batch))
                self._split(batch)
            case _:
                raise ChildDied("an answer to another question")

    def _split(self, batch: list[Unit]) -> None:
        """Units of a failed batch run once more, each alone; one that was alone has failed for good."""
        if len(batch) == 1:
            self._fail(batch, Internal("the media could not be computed", reason="ENCODE_FAILED"))
            return
        for unit in batch:
            unit.alone = True
            self._waiting.append(unit)

    def _take_batch(self, slot: Slot) -> list[Unit]:
        batch, slot.batch = slot.batch, []
        if slot.timer is not None:
            slot.timer.cancel()
            slot.timer = None
        return batch

    def _drop_waiting(self) -> list[Unit]:
        waiting, self._waiting = self._waiting, []
        return waiting

    def _fail(self, units: Sequence[Unit], error: TwinlensError) -> None:
        for unit in units:
            if not unit.done.done():
                unit.done.set_exception(error)


def _no_worker() -> Unavailable:
    return Unavailable("no encoder worker is alive; one is being started", reason="NO_WORKER")


def _poison() -> Internal:
    return Internal("this media ends the encoder and is refused", reason="POISON_ITEM")
