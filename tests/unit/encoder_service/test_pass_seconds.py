"""How much goes into one pass, when workers take as long as a test says."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.encoder_service.fakes import DONE, marks, submit, turns


@pytest.fixture
async def clock(monkeypatch):
    """The loop's time in a list, which a test moves on."""
    loop = asyncio.get_running_loop()
    now = [loop.time()]
    monkeypatch.setattr(loop, "time", lambda: now[0])
    return now


async def _passes(clock, worker, seconds_per_patch: float, count: int, patches: int = 10) -> None:
    """The worker is through with `count` passes more, each after the time that its patches take."""
    for _ in range(count):
        clock[0] += seconds_per_patch * patches * len(worker.batches[-1].pieces)
        worker.say(DONE)
        await turns()


async def test_the_first_pass_is_one_unit_and_later_ones_fill_their_time_by_the_pace(start, clock):
    dispatcher, (worker,), _ = await start(pass_seconds=0.55)
    units = [submit(dispatcher, bytes([at]), at=at) for at in range(10)]
    await turns()
    assert marks(worker) == [[0]], "nobody knows yet how long it takes"
    await _passes(clock, worker, 0.01, 3)
    assert marks(worker) == [[0], [1, 2, 3, 4, 5], [6, 7, 8, 9]]
    assert all(unit.done.done() for unit in units)


async def test_a_slow_worker_gets_one_unit_a_pass_in_the_order_in_which_they_came(start, clock):
    dispatcher, (worker,), _ = await start(pass_seconds=0.55)
    units = [submit(dispatcher, bytes([at]), at=at) for at in range(4)]
    await turns()
    await _passes(clock, worker, 0.08, 2)
    assert marks(worker) == [[0], [1], [2]]
    assert [unit.done.done() for unit in units] == [True, True, False, False]


async def test_a_worker_that_has_become_fast_gets_longer_passes(start, clock):
    dispatcher, (worker,), _ = await start(pass_seconds=0.6, max_units=64)
    for at in range(400):
        submit(dispatcher, at.to_bytes(2, "little"), at=at)
    await turns()
    await _passes(clock, worker, 1.0, 1)
    assert len(worker.batches[-1].pieces) == 1
    await _passes(clock, worker, 0.005, 40)
    assert len(worker.batches[-1].pieces) == 10, "and no more than the budget"


async def test_without_a_time_passes_are_as_large_as_the_budget(start, clock):
    dispatcher, (worker,), _ = await start(pass_seconds=0.0)
    for at in range(16):
        submit(dispatcher, bytes([at]), at=at)
    await turns()
    await _passes(clock, worker, 10.0, 1)
    assert [len(batch.pieces) for batch in worker.batches] == [8, 8]


async def test_each_idle_worker_gets_a_unit_though_one_fills_the_time_of_a_pass(start, clock):
    dispatcher, workers, _ = await start(pass_seconds=0.5, workers=2)
    submit(dispatcher, b"first", at=0)
    await turns()
    await _passes(clock, workers[0], 0.2, 1)
    for at in range(1, 4):
        submit(dispatcher, bytes([at]), at=at)
    await turns()
    assert [marks(worker) for worker in workers] == [[[0], [1]], [[2]]]
    assert dispatcher.pass_patches == 3, "two and a half, of which a unit has ten"
