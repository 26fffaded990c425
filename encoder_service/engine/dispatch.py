"""Gives batches to idle workers; the work of one that dies goes to another.

A unit's future completes only when no worker can write its rows any more, so that its owner may then free its memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.aio.tasks import end_process
from common.errors import Internal, TwinlensError, Unavailable
from common.process.children import ChildDied
from common.telemetry import log
from encoder_service.engine.batch_history import BatchStats, BatchTotals, Pace, Suspects
from encoder_service.engine.batching import Unit, assemble, assemble_full
from encoder_service.engine.device_pool import DevicePools
from encoder_service.engine.workers import MODULE, Workers, WorkerSlot, WorkerTimes
from encoder_service.worker.messages import Batch, BatchDone, BatchFailed, FromWorker, Piece, WorkerSettings

_log = log.get("dispatch")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Bounds of batches."""

    budget: int
    """Patches; a batch has at least one unit in any case."""
    max_units: int
    pass_seconds: float = 0.0
    """No more patches than a worker recently computed in these, so that later arrivals, and others on the same
    processor, wait no longer; only one unit before any pace is known. 0: no such bound."""
    seconds: float
    """A worker that computes longer is killed."""
    patience: float
    """So is one that takes 20 times what was expected, and at least these seconds, unless it holds a unit that has
    killed a worker before: a second death gets such a unit refused for a minute, which a slow machine must not
    cause."""


class Dispatcher:
    """Runs units in batches on `settings`, one worker each, which runs `module`. `start` and `stop` are its owner's.

    `on_change` is called when the number of live workers changes, `on_batch` for each computed pass. `die` ends this
    process if the dispatcher has a defect, since units would wait for it in vain.
    """

    def __init__(
        self,
        settings: Sequence[WorkerSettings],
        fds: tuple[int, int],
        limits: BatchLimits,
        times: WorkerTimes,
        *,
        module: str = MODULE,
        on_change: Callable[[int], None] = lambda _: None,
        on_batch: Callable[[BatchStats], None] = lambda _: None,
        pools: DevicePools | None = None,
        suspects: Suspects | None = None,
        die: Callable[[], None] = end_process,
    ) -> None:
        self._limits = limits
        self._on_change = on_change
        self._on_batch = on_batch
        self.pools = pools or DevicePools(row_bytes=0)
        self._workers = Workers(
            settings,
            fds,
            self.pools,
            times,
            module=module,
            on_reply=self._on_reply,
            on_death=self._on_death,
            on_ready=self._on_ready,
            die=die,
        )
        self._die = die
        self._waiting: list[Unit] = []
        self._suspects = suspects or Suspects()
        self._pace = Pace()
        self._number = 0
        self._pumping = False
        self.totals = BatchTotals()

    async def start(self) -> None:
        """Starts all workers; raises WorkerError if one cannot start."""
        await self._workers.start()
        self._on_change(self.alive)

    async def stop(self) -> None:
        """Stops all workers and fails the remaining units; returns when the processes are gone."""
        await self._workers.stop()
        left = [unit for slot in self._workers.slots for unit in slot.take_all()]
        self._fail([*left, *self._drop_waiting()], Unavailable("the service is stopping", reason="STOPPING"))

    @property
    def alive(self) -> int:
        """Workers that can compute."""
        return self._workers.alive

    @property
    def busy_seconds(self) -> float:
        """Seconds in which workers had a batch to compute, over all workers, including batches in progress."""
        return self._workers.busy_seconds

    @property
    def devices(self) -> list[str]:
        """The device of each worker."""
        return [each.device for each in self._workers.settings]

    @property
    def waiting(self) -> Sequence[Unit]:
        """Units that no worker has."""
        return self._waiting

    @property
    def running(self) -> list[Unit]:
        """Units that a worker has."""
        return [unit for slot in self._workers.slots for unit in slot.units]

    @property
    def pass_patches(self) -> int:
        """Patches that a worker should get through within the time of a pass, as far as that is known."""
        limits = self._limits
        patches = self._pace.patches(limits.pass_seconds) if limits.pass_seconds else None
        return limits.budget if patches is None else min(limits.budget, patches)

    def estimate(self) -> float | None:
        """Seconds until everything here has been computed, by the recent pace, but at least as long as each worker has
        computed by now: what hangs takes longer than earlier batches. None if unknown."""
        patches = sum(unit.patches for unit in (*self._waiting, *self.running))
        seconds = self._pace.seconds(patches)
        if seconds is None or not self.alive:
            return None
        return max(seconds / self.alive, min(slot.computing_seconds for slot in self._workers.slots if slot.child))

    def check(self, key: bytes) -> None:
        """Raises an error if an item cannot be computed: it kills workers, or there is none."""
        if self._suspects.is_poison(key):
            raise _poison()
        if not self.alive:
            raise _no_worker()

    def submit(
        self, key: bytes, piece: Piece, patches: int, priority: int, first_group: int = 0, *, pooled: bool = True
    ) -> Unit:
        """Queues a unit: the frame groups of an item from `first_group` on. If `pooled`, its rows also go to the
        worker's pool, if it has one.

        `done` raises Unavailable if all workers died, Internal if the unit cannot be computed.
        """
        self.check(key)
        self._number += 1
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        alone = self._suspects.has(key)
        unit = Unit(
            key, piece, patches, priority, self._number, done, first_group=first_group, pooled=pooled, alone=alone
        )
        self._waiting.append(unit)
        self._pump_soon()
        return unit

    def withdraw(self, unit: Unit) -> bool:
        """Removes a unit from the queue; False if a worker has it."""
        if unit not in self._waiting:
            return False
        self._waiting.remove(unit)
        unit.done.cancel()
        return True

    def check_integrity(self) -> None:
        """Raises AssertionError if a unit is in two places, or has ended and is still there."""
        units = [*self._waiting, *self.running]
        assert len(units) == len(set(map(id, units))), "a unit is in two places"
        assert not any(unit.done.done() for unit in units), "a unit has ended and is still there"
        self.pools.check_integrity()

    def check_idle(self) -> None:
        """The same, and if a unit waits, or something is still held."""
        self.check_integrity()
        assert not self._waiting, "a unit waits for nobody"
        self.pools.check_idle()

    def _pump_soon(self) -> None:
        """Sends batches at the end of this turn of the loop, so that items that arrive together go together."""
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump_now)

    def _pump_now(self) -> None:
        try:
            self._pump()
        except Exception as error:  # noqa: BLE001 - the loop would log it, and go on without the units
            _log.error("batches cannot be given out", exc_info=error)
            self._die()

    def _pump(self) -> None:
        """Gives batches to idle workers, then full next batches to workers that look ahead."""
        self._pumping = False
        idle, budget = self._workers.idle, self.pass_patches
        max_units = self._limits.max_units if self._pace.batches or not self._limits.pass_seconds else 1
        batches = assemble(self._waiting, len(idle), budget, max_units)
        for slot, batch in zip(idle, batches, strict=False):
            self._send(slot, batch)
            slot.give(batch)
            slot.begin(self._limit(batch))
        for slot in self._workers.looking_ahead:
            if batch := assemble_full(self._waiting, budget, max_units):
                self._send(slot, batch)
                slot.ahead = batch
                batches.append(batch)
        if batches:
            for unit in self._waiting:
                unit.passed += 1

    def _send(self, slot: WorkerSlot, batch: list[Unit]) -> None:
        assert slot.child is not None
        for unit in batch:
            self._waiting.remove(unit)
            unit.started_at = unit.started_at or time.perf_counter()
            unit.copy = slot.pool.allocate(unit.piece.tokens) if slot.pool is not None and unit.pooled else None
            unit.piece.pool = unit.copy.span.offset if unit.copy is not None else -1
        slot.child.send(Batch([unit.piece for unit in batch]))

    def _limit(self, batch: Sequence[Unit]) -> float:
        """Seconds after which a worker that has not answered is considered hung."""
        if any(unit.alone for unit in batch):
            return self._limits.seconds
        return self._pace.limit(sum(unit.patches for unit in batch), self._limits.patience, self._limits.seconds)

    def _on_death(self, slot: WorkerSlot) -> None:
        """A worker is gone: its units go to another, each alone, since one of them may have been the cause."""
        batch = slot.take_all()
        self.totals.worker_deaths += 1
        self._on_change(self.alive)
        self._suspects.blame((unit.key, unit.first_group) for unit in batch)
        for unit in batch:
            unit.give_up_copy()
            poison = self._suspects.is_poison(unit.key)
            if self.alive and not poison:
                unit.alone = True
                self._waiting.append(unit)
            else:
                self._fail([unit], _poison() if poison else _no_worker())
        if not self.alive:
            self._fail(self._drop_waiting(), _no_worker())
        self._pump_soon()

    def _on_ready(self, _: WorkerSlot) -> None:
        self._on_change(self.alive)
        self._pump_soon()

    def _on_reply(self, slot: WorkerSlot, answer: FromWorker) -> None:
        """A worker has answered for a batch, or for a part of one. With the last part it gets its next batch in the
        same turn of the loop."""
        began, alone = slot.began, len(slot.sent) == 1
        match answer:
            case BatchDone():
                units = slot.take(answer.pieces)
                self._count(units, answer, asyncio.get_running_loop().time() - began)
                for index, unit in enumerate(units):
                    self._suspects.clear(unit.key, unit.groups)
                    unit.preprocess = answer.preprocess_seconds
                    if index in answer.not_finite:
                        unit.give_up_copy()
                        self._fail([unit], Internal("the rows are not finite", reason="ROWS_NOT_FINITE"))
                        continue
                    if unit.copy is not None:
                        unit.copy.commit(answer.row_sums[index])
                    if not unit.done.done():
                        unit.done.set_result(None)
            case BatchFailed():
                units = slot.take(answer.pieces)
                _log.error("a batch failed", worker=slot.index, cause=answer.why, units=len(units))
                for unit in units:
                    unit.give_up_copy()
                self._split(units, alone=alone)
            case _:
                raise ChildDied("an answer to another question")
        if slot.batch:
            slot.begin(self._limit(slot.batch))
        self._pump()

    def _count(self, units: Sequence[Unit], answer: BatchDone, seconds: float) -> None:
        patches = sum(unit.patches for unit in units)
        self._pace.learn(patches, seconds)
        self.totals.vit_calls += 1
        self.totals.vit_patches += patches
        self.totals.graph_calls += answer.replayed
        self.totals.late_compiles += answer.late_compiles
        self.totals.preprocess_seconds += answer.preprocess_seconds
        self.totals.vit_seconds += answer.vit_seconds
        fill = patches / max(patches, self._limits.budget)
        self._on_batch(BatchStats(len(units), patches, fill, answer.preprocess_seconds, answer.vit_seconds))

    def _split(self, batch: list[Unit], *, alone: bool) -> None:
        """Units that failed run once more, each alone; one that was `alone` has failed for good."""
        if alone:
            self._fail(batch, Internal("the media could not be computed", reason="ENCODE_FAILED"))
            return
        for unit in batch:
            unit.alone = True
            self._waiting.append(unit)

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
    return Internal("this media crashes the encoder and is refused", reason="POISON_ITEM")
