"""The dispatcher, with workers that live and die as the tests say."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from common.errors import Internal, Unavailable
from encoder_service.engine import dispatch
from encoder_service.engine.batching import Unit
from encoder_service.engine.dispatch import Dispatcher
from encoder_service.worker.messages import BatchDone, BatchFailed, Begin, Failed, Piece
from tests.unit.encoder_service.fakes import DONE, FakeChild, turns

BEGIN = Begin(folder="", device="cpu", dtype="float32", threads=1, staging_bytes=0, store_bytes=0)
Start = Callable[..., Awaitable[tuple[Dispatcher, list[FakeChild]]]]


@pytest.fixture
async def start(monkeypatch):
    """Starts a dispatcher over fake workers; `children` grows as workers are replaced."""
    made: list[Dispatcher] = []

    async def starts(workers: int = 1, **bounds) -> tuple[Dispatcher, list[FakeChild], list[int]]:
        children: list[FakeChild] = []
        alive: list[int] = []

        async def child(*_, **__) -> FakeChild:
            children.append(FakeChild())
            return children[-1]

        monkeypatch.setattr(dispatch.Child, "start", child)
        given = {"budget": 100, "most_units": 8, "seconds": 60.0, "on_change": alive.append, **bounds}
        made.append(Dispatcher([BEGIN] * workers, (0, 0), **given))
        await made[-1].start()
        return made[-1], children, alive

    yield starts
    for each in made:
        await each.stop()


def submit(dispatcher: Dispatcher, key: bytes, patches: int = 10, at: int = 0) -> Unit:
    piece = Piece(video=False, pixels=at, frames=1, height=1, width=1, resized=(1, 1), grid=(1, 1, 1), rows=0)
    return dispatcher.submit(key, piece, patches, 0)


def marks(child: FakeChild) -> list[list[int]]:
    return [[piece.pixels for piece in batch.pieces] for batch in child.batches]


async def test_what_comes_together_goes_together_and_what_comes_later_waits(start):
    dispatcher, (worker,), _ = await start()
    units = [submit(dispatcher, bytes([at]), at=at) for at in range(3)]
    await turns()
    late = submit(dispatcher, b"late", at=9)
    await turns()
    assert marks(worker) == [[0, 1, 2]]
    assert (len(dispatcher.running), list(dispatcher.waiting)) == (3, [late])
    worker.say(DONE)
    await turns()
    assert all(unit.done.done() for unit in units)
    assert marks(worker) == [[0, 1, 2], [9]]
    assert (dispatcher.counters.vit_calls, dispatcher.counters.vit_patches) == (1, 30)


async def test_a_unit_can_be_withdrawn_until_a_worker_has_it(start):
    dispatcher, (worker,), _ = await start()
    first = submit(dispatcher, b"a")
    await turns()
    second = submit(dispatcher, b"b", at=1)
    assert not dispatcher.withdraw(first)
    assert dispatcher.withdraw(second)
    worker.say(DONE)
    await turns()
    assert marks(worker) == [[0]]
    assert second.done.cancelled()


async def test_a_dead_worker_s_units_go_to_another_each_alone(start):
    dispatcher, children, alive = await start(workers=2)
    units = [submit(dispatcher, bytes([at]), patches=40, at=at) for at in range(4)]
    await turns()
    assert [len(batch) for child in children for batch in marks(child)] == [2, 2]
    lost = marks(children[0])[0]
    children[0].kill()
    await turns()
    children[1].say(DONE)
    await turns()
    assert len(marks(children[1])[1]) == 1, "a suspect runs alone"
    for _ in range(4):
        for child in children[1:]:
            if child.alive and child.batches:
                child.say(DONE)
                child.batches.clear()
        await turns()
    assert all(unit.done.done() and unit.done.exception() is None for unit in units), lost
    assert alive[:3] == [2, 1, 2]


async def test_the_only_worker_s_death_fails_what_it_had_and_what_waited(start):
    dispatcher, children, alive = await start()
    running = submit(dispatcher, b"a")
    await turns()
    waiting = submit(dispatcher, b"b")
    children[0].kill()
    await turns()
    for unit in (running, waiting):
        assert isinstance(unit.done.exception(), Unavailable)
        assert unit.done.exception().retry_after
    assert (len(children), dispatcher.alive, alive) == (2, 1, [1, 0, 1])
    again = submit(dispatcher, b"b")
    await turns()
    children[1].say(DONE)
    await turns()
    assert again.done.result() is None


async def test_nothing_can_be_submitted_where_no_worker_lives(start, monkeypatch):
    dispatcher, children, _ = await start()
    never = asyncio.Event()

    async def hangs(*_, **__):
        await never.wait()

    monkeypatch.setattr(dispatch.Child, "start", hangs)
    children[0].kill()
    await turns()
    with pytest.raises(Unavailable):
        submit(dispatcher, b"a")


async def test_what_was_there_at_two_deaths_is_poison(start):
    dispatcher, children, _ = await start(workers=2)
    victim = submit(dispatcher, b"poison")
    await turns()
    for child in list(children):
        if child.batches:
            child.kill()
    await turns()
    next(child for child in children if child.alive and child.batches).kill()
    await turns()
    assert isinstance(victim.done.exception(), Internal)
    with pytest.raises(Internal, match="refused"):
        dispatcher.check(b"poison")
    dispatcher.check(b"harmless")


async def test_a_suspect_that_ends_well_is_none_any_more(start):
    dispatcher, children, _ = await start()
    for _ in range(3):
        unit = submit(dispatcher, b"a")
        await turns()
        children[-1].kill()
        await turns()
        assert isinstance(unit.done.exception(), Unavailable)
        again = submit(dispatcher, b"a")
        await turns()
        children[-1].say(DONE)
        await turns()
        assert again.done.result() is None


async def test_units_of_a_failed_batch_run_once_more_each_alone(start):
    dispatcher, (worker,), _ = await start()
    units = [submit(dispatcher, bytes([at]), at=at) for at in range(3)]
    await turns()
    worker.say(BatchFailed(why="out of memory"))
    await turns()
    worker.say(BatchFailed(why="out of memory"))
    for _ in range(2):
        await turns()
        worker.say(DONE)
    await turns()
    assert marks(worker) == [[0, 1, 2], [0], [1], [2]]
    assert isinstance(units[0].done.exception(), Internal)
    assert [unit.done.exception() for unit in units[1:]] == [None, None]


async def test_rows_that_are_not_finite_fail_their_item_alone(start):
    dispatcher, (worker,), _ = await start()
    units = [submit(dispatcher, bytes([at]), at=at) for at in range(3)]
    await turns()
    worker.say(BatchDone(not_finite=[1], preprocess_seconds=0.0, vit_seconds=0.0))
    await turns()
    assert [type(unit.done.exception()) for unit in units] == [type(None), Internal, type(None)]


async def test_a_batch_that_takes_too_long_ends_its_worker(start):
    dispatcher, children, _ = await start(seconds=0.01)
    unit = submit(dispatcher, b"a")
    with pytest.raises(Unavailable):
        await unit.done
    assert not children[0].alive


async def test_a_worker_that_cannot_start_says_why(monkeypatch):
    class Unwilling(FakeChild):
        def send(self, message):
            self.say(Failed(why="no such device"))

    async def child(*_, **__) -> FakeChild:
        return Unwilling()

    monkeypatch.setattr(dispatch.Child, "start", child)
    dispatcher = Dispatcher([BEGIN], (0, 0), budget=1, most_units=1, seconds=1.0)
    with pytest.raises(dispatch.WorkerError, match="no such device"):
        await dispatcher.start()
    await dispatcher.stop()


async def test_stopping_fails_what_is_left(start):
    dispatcher, _, _ = await start()
    running = submit(dispatcher, b"a")
    await turns()
    waiting = submit(dispatcher, b"b")
    await dispatcher.stop()
    assert all(isinstance(unit.done.exception(), Unavailable) for unit in (running, waiting))
