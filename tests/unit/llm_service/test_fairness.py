"""Who is computed first: decodes, then rank and length, so that nobody is overtaken for ever."""

from __future__ import annotations

import itertools
import random
from array import array

import numpy as np
import pytest

from llm_service.engine.block_manager import BlockManager
from llm_service.engine.limits import SchedulerLimits
from llm_service.engine.messages import Add
from llm_service.engine.scheduler import Scheduler
from llm_service.plan import StepResult
from llm_service.request import SamplingParams
from tests.unit.llm_service.hashed import Picture
from tests.unit.llm_service.simulated import order, run_until_over, simulation, text


def test_a_prompt_of_thousands_of_tokens_costs_no_decode_a_step() -> None:
    """Each of its chunks is one step, and every running answer gets a token in each of them."""
    engine = simulation(blocks=700, block_size=16, max_running=8, step_tokens=512, prefix_cache=False)
    talking = [engine.submit(order(text(8, seed), max_tokens=100)) for seed in range(4)]
    engine.step()
    long = engine.submit(order(text(8192, 9), max_tokens=1))
    steps = 0
    while not engine.outcomes[long].over:
        before = [len(engine.outcomes[id].tokens[0]) for id in talking]
        step = engine.step()
        assert step is not None
        assert step.plan.tokens <= 512
        assert [len(engine.outcomes[id].tokens[0]) for id in talking] == [count + 1 for count in before]
        steps += 1
    assert steps == -(-8192 // (512 - 4))


def test_a_short_prompt_does_not_stand_behind_a_long_one() -> None:
    engine = simulation(blocks=200, block_size=16, step_tokens=64)
    long = engine.submit(order(text(2000, 1), max_tokens=1))
    engine.step()
    short = engine.submit(order(text(30, 2), max_tokens=1))
    engine.step()
    assert engine.outcomes[short].over
    assert not engine.outcomes[long].over


def test_a_long_prompt_is_not_overtaken_for_ever_by_short_ones() -> None:
    """Half of what is left for prefill is its own, however many come."""
    engine = simulation(blocks=400, block_size=16, max_running=16, step_tokens=64)
    long = engine.submit(order(text(960, 1), max_tokens=1))
    steps = 0
    while not engine.outcomes[long].over:
        for seed in range(3):
            engine.submit(order(text(40, 2 + (3 * steps + seed) % 50), max_tokens=1))
        engine.step()
        steps += 1
    assert steps <= 960 // 32 + 1


def test_of_two_long_prompts_the_first_one_is_computed_first() -> None:
    engine = simulation(blocks=200, block_size=16, step_tokens=64)
    first, second = (engine.submit(order(text(1000, seed), max_tokens=1)) for seed in (1, 2))
    while not engine.outcomes[first].over:
        engine.step()
    assert not engine.outcomes[second].over


def test_decodes_come_first_and_a_long_prefill_is_cut_around_them() -> None:
    engine = simulation(step_tokens=10)
    short = engine.submit(order(text(4, 1), max_tokens=30))
    engine.step()
    engine.submit(order(text(60, 2)))
    for _ in range(6):
        before = len(engine.outcomes[short].tokens[0])
        step = engine.step()
        assert step is not None
        assert (step.work[0][0].id, step.work[0][1]) == (short, 1)
        assert step.plan.tokens == 10
        assert len(engine.outcomes[short].tokens[0]) == before + 1


def test_a_request_whose_rows_are_late_holds_nobody_up() -> None:
    engine = simulation(max_running=2)
    late = engine.submit(order(text(12), [Picture(1, 0, 6)]))
    prompt = engine.submit(order(text(12, 3)))
    run_until_over(engine, prompt)
    assert not engine.outcomes[late].over
    engine.land_all(late)
    run_until_over(engine, late)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("more", [{}, {"prefix_cache": False}, {"keep_media_whole": True}], ids=str)
def test_requests_that_wait_for_rows_in_the_middle_of_their_prompt_keep_no_place_from_others(
    more: dict[str, bool], overlap: bool
) -> None:
    engine = simulation(max_running=2, overlap=overlap, **more)
    late = [engine.submit(order(text(12, name), [Picture(name, 4, 6)])) for name in (1, 2)]
    engine.step()
    engine.step()
    assert engine.scheduler.state().running == 2, "the text before the pictures is computed"
    for seed in range(3, 6):
        run_until_over(engine, engine.submit(order(text(12, seed))))
    engine.land(late[1], 0, 2)
    engine.step()
    run_until_over(engine, engine.submit(order(text(12, 6))))
    assert not any(engine.outcomes[id].over for id in late)
    assert engine.scheduler.counters.preemptions == 0, "blocks did not run out"
    engine.drain()


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_that_wait_for_rows_keep_no_blocks_from_others(overlap: bool) -> None:
    """All but what somebody needs stays theirs: they go on from there."""
    engine = simulation(blocks=16, overlap=overlap)
    first, second = (engine.submit(order(text(28, name), [Picture(name, 24, 3)])) for name in (1, 2))
    engine.step()
    engine.step()
    assert engine.scheduler.blocks.used == 12
    run_until_over(engine, engine.submit(order(text(16, 3))))
    engine.step()
    assert engine.scheduler.blocks.used == 6, "the first one keeps its own"
    engine.land_all(second)
    step = engine.step()
    assert step is not None
    assert (step.work[0][0].id, step.work[0][1]) == (second, 28 - 20)
    engine.land_all(first)
    engine.drain()


@pytest.mark.parametrize("seed", range(60))
def test_an_engine_never_rests_while_a_request_has_all_of_its_rows(seed: int) -> None:
    """Whatever comes, over caches that are too tight for all, where many rows never land until the end."""
    rng, pictures = random.Random(seed), 0
    engine = simulation(
        blocks=rng.randrange(6, 30),
        block_size=rng.choice([1, 2, 4]),
        max_running=rng.randrange(1, 5),
        step_tokens=rng.randrange(6, 24),
        overlap=rng.random() < 0.5,
        prefix_cache=rng.random() < 0.7,
        keep_media_whole=rng.random() < 0.3,
        early_tokens=rng.choice([0, 1, 1, 4]),
    )
    for _ in range(60):
        if rng.random() < 0.5:
            length, start, rows = rng.randrange(1, engine.limits.max_context - 1), rng.randrange(8), rng.randrange(1, 6)
            shown = [Picture(pictures := pictures + 1, start, rows)] if rng.random() < 0.6 else []
            prompt = text(max(length, start + rows) if shown else length, rng.randrange(3))
            if len(prompt) < engine.limits.max_context:
                engine.submit(order(prompt, shown, max_tokens=rng.randrange(1, 8), priority=rng.randrange(2)))
        for id, outcome in engine.outcomes.items():
            for picture in outcome.order.pictures:
                if not outcome.over and rng.random() < 0.03:
                    engine.land(id, 0, rng.randrange(picture.rows + 1))
        for _ in range(rng.randrange(6)):
            if engine.step() is None:
                queues = engine.scheduler._queues
                assert not [
                    each for each in (*queues.waiting, *queues.running) if each.num_computable(0) == len(each.tokens)
                ]
    engine.drain()


def test_nobody_gives_up_what_would_not_do_or_for_one_that_would_only_wait_in_its_turn() -> None:
    engine = simulation(blocks=16, max_running=2)
    talking = engine.submit(order(text(20, 1), max_tokens=30))
    late = engine.submit(order(text(8, 2), [Picture(2, 4, 2)]))
    engine.step()
    engine.submit(order(text(12, 4), [Picture(3, 0, 4)]))  # has no row yet
    engine.submit(order(text(12, 5), [Picture(4, 4, 4)]))  # has the text before its picture alone
    engine.submit(order(text(50, 3)))  # too large beside the first
    while not engine.outcomes[talking].over:
        engine.step()
        running = {sequence.id for sequence in engine.scheduler._queues.running}
        assert running | {talking} == {talking, late}
    engine.drain()


def test_a_large_request_is_not_overtaken_for_ever_by_small_ones() -> None:
    engine = simulation(blocks=16, max_running=4, step_tokens=16)
    for seed in range(4):
        engine.submit(order(text(8, seed), max_tokens=6))
    engine.step()
    large = engine.submit(order(text(60, 9), max_tokens=3))
    for seed in range(300):
        engine.submit(order(text(8, seed % 7), max_tokens=6))
        engine.step()
        if engine.outcomes[large].over:
            return
    raise AssertionError("small requests overtook a large one for ever")


def test_equal_priorities_start_in_order_of_arrival_and_higher_ones_before() -> None:
    engine = simulation(max_running=1, step_tokens=16)
    first = engine.submit(order(text(6, 1)))
    engine.step()
    ids = [engine.submit(order(text(6, seed), priority=priority)) for seed, priority in ((2, 0), (3, 0), (4, 5))]
    ended = [first]
    while len(ended) < 4:
        engine.step()
        ended += [id for id in ids if engine.outcomes[id].over and id not in ended]
    assert ended == [first, ids[2], ids[0], ids[1]]


def test_when_blocks_run_out_the_last_in_rank_gives_way_and_says_the_same_later() -> None:
    engine = simulation(blocks=9, block_size=2, prefix_cache=False)
    ids = [engine.submit(order(text(6, seed), max_tokens=8)) for seed in (1, 2)]
    preempted: list[int] = []
    while not all(engine.outcomes[id].over for id in ids):
        before = engine.scheduler.counters.preemptions
        engine.step()
        if engine.scheduler.counters.preemptions > before:
            preempted += [id for id in ids if not engine.outcomes[id].over]
            assert not engine.outcomes[ids[0]].over, "the first in rank gave way"
    assert preempted
    engine.check_over()


def test_a_prompt_that_is_half_computed_goes_on_though_others_keep_coming() -> None:
    """What they leave is its own: it was begun, and nobody kept blocks for its rest."""
    engine = simulation(blocks=64, block_size=16, max_running=16, step_tokens=256, prefix_cache=False)
    numbers = random.Random(1)

    def submit_short() -> None:
        engine.submit(order(text(16, numbers.randrange(10_000)), max_tokens=numbers.randrange(30, 60)))

    for _ in range(2):
        submit_short()
    for _ in range(3):
        engine.step(check=False)
    long = engine.submit(order(text(950, 5), max_tokens=4, priority=5))
    for _ in range(400):
        while len(engine.scheduler._queues.waiting) < 4:
            submit_short()
        engine.step(check=False)
        if engine.outcomes[long].over:
            return
    pytest.fail("it has not come to its end")


def added(id: int, length: int, max_tokens: int, seed: int) -> Add:
    """A request of text, as the engine gets it."""
    places = np.tile(np.arange(length, dtype=np.int32), (3, 1))
    return Add(
        id=id,
        token_ids=array("i", text(length, seed)).tobytes(),
        positions=places.tobytes(),
        mrope_delta=0,
        items=[],
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        salt="",
        priority=0,
        deadline=None,
    )


@pytest.mark.parametrize("slowdown", [0.0, 2.5])
def test_the_first_that_waits_is_not_overtaken_for_ever_where_decodes_keep_their_pace(slowdown: float) -> None:
    """Every second step goes by length alone then; what has become free is the first one's all the same."""
    blocks = BlockManager(64, 16, prefix_cache=False)
    scheduler = Scheduler(blocks, SchedulerLimits(16, 256, 1024, decode_slowdown=slowdown), frozenset([31]), 64)
    numbers, ids, long, now = random.Random(3), itertools.count(1), 0, 0.0
    for step in range(1200):
        while len(scheduler._queues.waiting) < 3:
            scheduler.add(added(next(ids), numbers.randrange(8, 60), numbers.randrange(50, 200), step))
        if step == 300:
            scheduler.add(added(long := next(ids), 800, 4, 9))
        made, _ = scheduler.schedule()
        draws = len(made.plan.draws)
        ended = now + 0.01 + 0.0001 * sum(count for _, _, count in made.prefill)
        scheduler.finish(made, StepResult([1] * draws, [None] * draws, began=now, ended=ended))
        now = ended
        scheduler.take_notices()
        if long and long not in scheduler._queues.requests:
            return
    pytest.fail("it has not come to its end")
