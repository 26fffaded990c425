"""Items without a place in the row arena: the cache covers them, they have been read, or the engine asks for them and
waits."""

from __future__ import annotations

import pytest

from llm_service.engine.messages import NOWHERE
from llm_service.engine.sequence import WaitReason
from tests.unit.llm_service.hashed import Order, Picture, expected
from tests.unit.llm_service.simulated import Simulation, order, run_until_over, simulation, text

PICTURES = (Picture(name=1, start=3, rows=6), Picture(name=2, start=12, rows=5))
ORDER = order(text(30), PICTURES)
CHOICES = order(text(30), PICTURES, n=3, max_tokens=4, temperature=1.0, seed=3)


def computed_before(engine: Simulation, asked: Order = ORDER) -> None:
    """The request was computed once, and its rows have gone since."""
    id = engine.submit(asked)
    engine.land_all(id)
    run_until_over(engine, id)
    engine.executor.landed.clear()


def check(engine: Simulation, id: int) -> None:
    """Every choice has said what the prompt makes it say."""
    asked = engine.outcomes[id].order
    wanted = [expected(asked, choice, engine.limits)[0] for choice in range(asked.sampling.n)]
    assert engine.outcomes[id].tokens == wanted


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("asked", [ORDER, CHOICES], ids=["one choice", "three choices"])
def test_what_the_cache_covers_needs_no_place(asked: Order, overlap: bool) -> None:
    engine = simulation(overlap=overlap)
    computed_before(engine)
    again = engine.submit(asked, nowhere=2)
    run_until_over(engine, again)
    assert engine.rows_needed == []
    check(engine, again)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("asked", [ORDER, CHOICES], ids=["one choice", "three choices"])
def test_what_it_does_not_cover_is_asked_for_once_and_waited_for(asked: Order, overlap: bool) -> None:
    engine = simulation(overlap=overlap)
    id = engine.submit(asked, nowhere=2)
    assert engine.step() is None
    assert engine.rows_needed == [id]
    engine.scheduler.landed(id, 0, 6)  # of a place that it had before: it means nothing now
    assert engine.step() is None
    assert engine.rows_needed == [id]
    engine.place(id)
    run_until_over(engine, id)
    assert engine.rows_needed == []
    check(engine, id)


def test_one_who_waits_for_places_holds_no_block_and_nobody_up() -> None:
    engine = simulation(blocks=16)
    waiting = engine.submit(ORDER, nowhere=2)
    assert engine.step() is None
    other = engine.submit(order(text(40, seed=1)))
    run_until_over(engine, other)
    assert engine.scheduler.state().kv_blocks_used == 0
    engine.place(waiting)
    run_until_over(engine, waiting)
    check(engine, waiting)


def test_a_part_that_is_covered_is_not_enough() -> None:
    """Blocks of the first picture are there, those of the second are not: both are asked for, together."""
    engine = simulation()
    computed_before(engine, order(ORDER.prompt[:12], PICTURES[:1]))
    id = engine.submit(ORDER, nowhere=2)
    engine.step()
    assert engine.rows_needed == [id]
    engine.place(id)
    run_until_over(engine, id)
    check(engine, id)


def test_one_who_leaves_while_waiting_leaves_nothing() -> None:
    engine = simulation()
    id = engine.submit(ORDER, nowhere=2)
    engine.step()
    engine.abort(id)
    engine.step()
    engine.place(id)  # it was on its way
    assert engine.step() is None
    engine.scheduler.check_integrity()


def test_choices_that_are_left_when_the_one_that_asked_ends_do_not_ask_again() -> None:
    engine = simulation()
    id = engine.submit(CHOICES, nowhere=2)
    engine.step()
    engine.abort_choice(id, 0)
    assert engine.step() is None
    assert engine.rows_needed == [id]
    engine.place(id)
    run_until_over(engine, id)
    wanted = [expected(CHOICES, choice, engine.limits)[0] for choice in (1, 2)]
    assert engine.outcomes[id].tokens == [[], *wanted]


def test_nobody_asks_while_another_choice_is_to_read_rows_where_they_are() -> None:
    engine = simulation(step_tokens=11)  # beside seven decodes there is no room for all five rows, so two may go first
    computed_before(engine, order(ORDER.prompt[:12], PICTURES[:1]))
    id = engine.submit(order(text(30), PICTURES, n=2), nowhere=1)
    engine.land(id, 1, 2)
    engine.step()  # up to the second row of the second picture
    queues = engine.scheduler._queues
    first, second = queues.requests[id]
    assert first.running
    assert not queues.displace(second)
    assert (second.wait_reason, second.prompt.items[1].offset) == (WaitReason.SIBLING, PICTURES[1].offset)
    engine.land(id, 1, 5)
    engine.step()
    assert queues.displace(second)
    assert {item.offset for item in second.prompt.items} == {NOWHERE}


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_that_have_been_read_are_given_back_while_the_answer_goes_on(overlap: bool) -> None:
    engine = simulation(overlap=overlap)
    id = engine.submit(order(text(30), PICTURES, max_tokens=20))
    engine.land(id, 0, 6)
    engine.step()
    engine.step()
    assert engine.rows_read == [], "the second picture is to come"
    engine.land(id, 1, 5)
    for _ in range(3):
        engine.step()
    assert engine.rows_read == [id]
    assert not engine.outcomes[id].over
    assert engine.executor.landed == {1: 0, 2: 0}
    run_until_over(engine, id)
    assert engine.rows_read == [id]
    check(engine, id)


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_are_kept_until_the_last_choice_has_read_them(overlap: bool) -> None:
    """The pictures end with the prompt, so each choice computes some of their places."""
    pictures = (Picture(name=1, start=3, rows=6), Picture(name=2, start=12, rows=5))
    engine = simulation(overlap=overlap, max_running=2)
    id = engine.submit(order(text(17), pictures, n=3, max_tokens=6))
    engine.land_all(id)
    engine.step()
    while engine.scheduler.state().waiting and not engine.outcomes[id].over:
        assert engine.rows_read == []
        engine.step()
    run_until_over(engine, id)
    assert engine.rows_needed == []
    check(engine, id)


def test_one_that_makes_way_behind_its_media_asks_for_their_places_again() -> None:
    engine = simulation(blocks=16, prefix_cache=False)
    first = engine.submit(order(text(22, seed=1), max_tokens=30))
    id = engine.submit(order(text(30), PICTURES, max_tokens=20))
    engine.land_all(id)
    for _ in range(60):
        engine.step()
    assert engine.outcomes[first].over
    assert engine.rows_read == engine.rows_needed == [id]
    engine.place(id)
    run_until_over(engine, id)
    assert engine.rows_read == [id, id]
    check(engine, id)


def test_another_engine_asks_for_places_that_the_one_before_gave_back() -> None:
    engine = simulation()
    id = engine.submit(order(text(30), PICTURES, max_tokens=20))
    engine.land_all(id)
    for _ in range(4):
        engine.step()
    assert engine.rows_read == [id]
    engine.die()
    assert engine.step() is None
    assert engine.rows_needed == [id]
    engine.place(id)
    run_until_over(engine, id)
    check(engine, id)
