"""Who is computed first: decodes, then rank and length, so that nobody is overtaken for ever."""

from __future__ import annotations

import random

import pytest

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
