"""Items that were there when a worker died or failed: they run alone, are cleared by an end, and refused as poison."""

from __future__ import annotations

import pytest

from common.errors import Internal, Unavailable
from encoder_service.engine.batch_history import Suspects
from encoder_service.worker.messages import BatchDone, BatchFailed
from tests.unit.encoder_service.fakes import DONE, marks, submit, turns


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


async def test_poison_is_tried_again_a_minute_later_alone_and_cleared_where_it_was_innocent(start):
    now = 0.0
    dispatcher, children, _ = await start(suspects=Suspects(lambda: now))

    async def dies() -> None:
        unit = submit(dispatcher, b"popular")
        await turns()
        children[-1].kill()
        await turns()
        assert unit.done.exception()

    await dies()
    now = 30.0
    await dies()
    now = 89.0
    with pytest.raises(Internal, match="refused"):
        dispatcher.check(b"popular")
    now = 90.0
    await dies()
    with pytest.raises(Internal, match="refused"):
        dispatcher.check(b"popular")
    now = 150.0
    again, other = submit(dispatcher, b"popular", at=1), submit(dispatcher, b"other", at=2)
    await turns()
    assert marks(children[-1]) == [[1]]
    for unit in (again, other):
        children[-1].say(DONE)
        await turns()
        assert unit.done.result() is None
    now = 151.0
    dispatcher.check(b"popular")
    await dies()
    dispatcher.check(b"popular")


async def test_a_video_that_ends_workers_is_poison_though_other_parts_of_it_are_computed(start):
    dispatcher, children, _ = await start()
    for error in (Unavailable, Internal):
        good, bad = (submit(dispatcher, b"film", patches=100, group=group) for group in (0, 1))
        await turns()
        children[-1].say(DONE)
        await turns()
        assert good.done.result() is None
        children[-1].kill()
        await turns()
        assert isinstance(bad.done.exception(), error)
    with pytest.raises(Internal, match="refused"):
        dispatcher.check(b"film")


async def test_a_video_s_parts_that_died_together_are_one_death_and_are_cleared_one_by_one(start):
    dispatcher, children, _ = await start()
    for _ in range(3):
        parts = [submit(dispatcher, b"film", group=group) for group in range(2)]
        await turns()
        children[-1].kill()
        await turns()
        assert all(isinstance(part.done.exception(), Unavailable) for part in parts)
        for group in range(2):
            assert dispatcher._suspects.has(b"film")
            again = submit(dispatcher, b"film", group=group)
            await turns()
            children[-1].say(DONE)
            await turns()
            assert again.done.result() is None
        assert not dispatcher._suspects.has(b"film")


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


async def test_nothing_is_sent_ahead_of_a_suspect_or_behind_one(start):
    dispatcher, children, _ = await start(device="cuda:0")
    first = submit(dispatcher, b"suspect")
    await turns()
    children[0].kill()
    await turns()
    with pytest.raises(Unavailable):
        first.done.result()
    suspect = submit(dispatcher, b"suspect", at=1)
    await turns()
    others = [submit(dispatcher, bytes([at]), patches=100, at=at) for at in (2, 3)]
    await turns()
    assert marks(children[1]) == [[1]], "behind one"
    children[1].say(DONE)
    await turns()
    assert suspect.done.done()
    assert marks(children[1]) == [[1], [2], [3]]
    assert not others[0].done.done()


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


async def test_a_worker_s_death_fails_no_unit_whose_batch_had_failed_before_where_there_is_another_worker(start):
    dispatcher, children, _ = await start(workers=2)
    submit(dispatcher, b"busy", patches=100, at=9)
    await turns()
    units = [submit(dispatcher, bytes([at]), at=at) for at in range(2)]
    await turns()
    children[1].say(BatchFailed(why="out of memory"))
    await turns()
    children[1].kill()
    await turns()
    assert [marks(child) for child in children] == [[[9]], [[0, 1], [0]], [[0]]]
    for child in (children[0], children[2], children[0]):
        child.say(DONE)
        await turns()
    assert [unit.done.done() and unit.done.exception() for unit in units] == [None, None]


async def test_rows_that_are_not_finite_fail_their_item_alone(start):
    dispatcher, (worker,), _ = await start()
    units = [submit(dispatcher, bytes([at]), at=at) for at in range(3)]
    await turns()
    worker.say(BatchDone(not_finite=[1], preprocess_seconds=0.0, vit_seconds=0.0))
    await turns()
    assert [type(unit.done.exception()) for unit in units] == [type(None), Internal, type(None)]
