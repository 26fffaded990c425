"""The dispatcher and its workers' device pools: who is told to write where, and what is kept of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from common.process.children import Child
from encoder_service.engine.device_pool import DevicePool, DevicePools
from encoder_service.engine.dispatch import Dispatcher
from encoder_service.worker.messages import BatchDone, BatchFailed, PoolMade, WorkerReady
from tests.unit.encoder_service.fakes import LIMITS, SETTINGS, TIMES, FakeChild, submit, turns

ROW = 64
ROOM = 3


@dataclass
class Bench:
    dispatcher: Dispatcher
    workers: list[FakeChild]
    pools: DevicePools

    @property
    def pool(self) -> DevicePool:
        return self.pools.alive[0]

    def places(self, worker: int = 0) -> list[list[int]]:
        return [[piece.pool for piece in batch.pieces] for batch in self.workers[worker].batches]


def done(*row_sums: int, not_finite: tuple[int, ...] = ()) -> BatchDone:
    return BatchDone(not_finite=list(not_finite), preprocess_seconds=0, vit_seconds=0, row_sums=list(row_sums))


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    """One worker with room for three rows; items have one row each."""
    workers: list[FakeChild] = []

    async def child(*_: object, **__: object) -> FakeChild:
        workers.append(FakeChild(ready=WorkerReady(pool=PoolMade("GPU-0", b"handle", ROOM * ROW))))
        return workers[-1]

    monkeypatch.setattr(Child, "start", child)
    pools = DevicePools(ROW)
    dispatcher = Dispatcher([SETTINGS], (0, 0), LIMITS, TIMES, pools=pools)
    await dispatcher.start()
    yield Bench(dispatcher, workers, pools)
    await dispatcher.stop()
    assert pools.alive == []


async def test_each_piece_gets_room_in_its_worker_s_pool_while_there_is_any(bench: Bench) -> None:
    units = [submit(bench.dispatcher, bytes([at]), at=at) for at in range(4)]
    await turns()
    assert bench.places() == [[0, ROW, 2 * ROW, -1]]
    bench.workers[0].say(done(5, 6, 7, 0))
    await turns()
    assert all(unit.done.done() for unit in units)
    assert [unit.copy.row_sum if unit.copy else None for unit in units] == [5, 6, 7, None]
    assert all(unit.copy.kept for unit in units[:3] if unit.copy)
    later = submit(bench.dispatcher, b"later", at=9)
    await turns()
    assert bench.places()[1] == [0], "the longest unused gives way"
    bench.workers[0].say(done(8))
    await turns()
    assert later.copy is not None
    assert units[0].copy is not None
    assert (later.copy.kept, units[0].copy.kept) == (True, False)
    bench.pools.check_idle()


async def test_what_was_not_written_is_given_back(bench: Bench) -> None:
    good, bad = submit(bench.dispatcher, b"good"), submit(bench.dispatcher, b"bad", at=1)
    await turns()
    bench.workers[0].say(done(5, 0, not_finite=(1,)))
    await turns()
    assert bad.done.exception() is not None
    assert (good.copy is None, bad.copy, bench.pool.used) == (False, None, ROW)
    alone = submit(bench.dispatcher, b"alone", at=2)
    await turns()
    bench.workers[0].say(BatchFailed(why="out of memory"))
    await turns()
    assert alone.done.exception() is not None
    assert (alone.copy, bench.pool.used) == (None, ROW)
    bench.pools.check_idle()


async def test_a_dead_worker_s_pool_is_lost_and_the_next_one_has_its_own(bench: Bench) -> None:
    kept, running = submit(bench.dispatcher, b"kept"), None
    await turns()
    bench.workers[0].say(done(5))
    await turns()
    running = submit(bench.dispatcher, b"running", at=1)
    await turns()
    old, lost = bench.pool, list[tuple[DevicePool, bool]]()
    bench.pools.on_lost = lambda pool: lost.append((pool, running.done.done()))
    bench.workers[0].kill()
    await turns(30)
    assert lost == [(old, False)]
    assert kept.copy is not None
    assert (kept.copy.kept, running.copy) == (False, None)
    assert bench.pool is not old
    assert bench.pool.name != old.name
    again = submit(bench.dispatcher, b"again", at=2)
    await turns()
    assert bench.places(1) == [[0]]
    bench.workers[1].say(done(9))
    await turns()
    assert again.copy is not None
    assert again.copy.pool is bench.pool
