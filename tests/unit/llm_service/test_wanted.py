"""Items without a place in the row arena: the cache covers them, or the engine asks for them and waits."""

from __future__ import annotations

import pytest

from llm_service.engine.messages import NOWHERE, Wanted
from tests.unit.llm_service.simulated import Picture, Simulation, expected
from tests.unit.llm_service.test_scheduler import order, run_until_over, simulation, text

PICTURES = (Picture(name=1, start=3, rows=6), Picture(name=2, start=12, rows=5))
ORDER = order(text(30), PICTURES)


def submit_nowhere(engine: Simulation) -> int:
    """The request, with no place for any of its items."""
    id = engine.submit(ORDER)
    for sequence in engine.scheduler._queues.requests[id]:
        for item in sequence.items:
            item.offset = NOWHERE
    return id


def place(engine: Simulation, id: int) -> None:
    """Gives all items their places, with all rows there."""
    for picture in PICTURES:
        engine.executor.landed[picture.name] = picture.rows
    engine.scheduler.placed(id, [(picture.offset, picture.rows) for picture in PICTURES])


def said(engine: Simulation, id: int) -> list[int]:
    return engine.outcomes[id].tokens[0]


@pytest.mark.parametrize("overlap", [False, True])
def test_what_the_cache_covers_needs_no_place(overlap: bool) -> None:
    engine = simulation(overlap=overlap)
    first = engine.submit(ORDER)
    engine.land_all(first)
    run_until_over(engine, first)
    again = submit_nowhere(engine)
    run_until_over(engine, again)
    assert engine.scheduler.take_wanted() == []
    assert said(engine, again) == said(engine, first) == expected(ORDER, 0, engine.limits)[0]


@pytest.mark.parametrize("overlap", [False, True])
def test_what_it_does_not_cover_is_asked_for_once_and_waited_for(overlap: bool) -> None:
    engine = simulation(overlap=overlap)
    id = submit_nowhere(engine)
    assert engine.step() is None
    assert engine.scheduler.take_wanted() == [Wanted(id)]
    engine.scheduler.landed(id, 0, 6)  # of a place that it had before: it means nothing now
    assert engine.step() is None
    assert engine.scheduler.take_wanted() == []
    place(engine, id)
    run_until_over(engine, id)
    assert said(engine, id) == expected(ORDER, 0, engine.limits)[0]


def test_one_who_waits_for_places_holds_no_block_and_nobody_up() -> None:
    engine = simulation(blocks=16)
    waiting = submit_nowhere(engine)
    assert engine.step() is None
    other = engine.submit(order(text(40, seed=1)))
    run_until_over(engine, other)
    assert engine.scheduler.state().kv_blocks_used == 0
    place(engine, waiting)
    run_until_over(engine, waiting)
    assert said(engine, waiting) == expected(ORDER, 0, engine.limits)[0]


def test_a_part_that_is_covered_is_not_enough() -> None:
    """Blocks of the first picture are there, those of the second are not: both are asked for, together."""
    engine = simulation()
    before = engine.submit(order(ORDER.prompt[:12], PICTURES[:1]))
    engine.land_all(before)
    run_until_over(engine, before)
    id = submit_nowhere(engine)
    engine.step()
    assert engine.scheduler.take_wanted() == [Wanted(id)]
    place(engine, id)
    run_until_over(engine, id)
    assert said(engine, id) == expected(ORDER, 0, engine.limits)[0]


def test_one_who_leaves_while_waiting_leaves_nothing() -> None:
    engine = simulation()
    id = submit_nowhere(engine)
    engine.step()
    engine.abort(id)
    engine.step()
    place(engine, id)  # it was on its way
    assert engine.step() is None
    engine.scheduler.check_integrity()
