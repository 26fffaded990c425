"""The scheduler, driven in every order that arrivals, landings, aborts, deadlines and steps can come in."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llm_service.request import Sampling
from tests.unit.llm_service.simulated import PAD, Order, Picture, Simulation, expected


def text(length: int, seed: int = 0) -> tuple[int, ...]:
    """A prompt without media; prompts of one seed begin alike."""
    return tuple(random.Random(seed).randrange(1, PAD) for _ in range(length))


def order(
    prompt: Seq[int], pictures: Seq[Picture] = (), *, salt: str = "", priority: int = 0, **sampling: object
) -> Order:
    """A greedy request for 4 tokens, unless said otherwise; media places become placeholders."""
    ids = list(prompt)
    for picture in pictures:
        for start, _, count in picture.placed():
            ids[start : start + count] = [PAD] * count
    chosen = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, **sampling}
    return Order(tuple(ids), Sampling(**chosen), tuple(pictures), salt, priority)


def simulation(
    *, blocks: int = 64, block_size: int = 4, max_running: int = 8, step_tokens: int = 32, **more: bool
) -> Simulation:
    return Simulation(blocks=blocks, block_size=block_size, max_running=max_running, step_tokens=step_tokens, **more)


def run_until_over(engine: Simulation, id: int, most: int = 1000) -> None:
    for _ in range(most):
        if engine.outcomes[id].over:
            return
        assert engine.step() is not None, "the engine rests while a request waits"
    raise AssertionError("a request does not end")


@st.composite
def orders(draw: st.DrawFn, context: int) -> Order:
    """Requests that share beginnings and pictures often, and fit the context."""
    length = draw(st.integers(1, context - 1))
    ids = list(text(length, draw(st.integers(0, 2))))
    pictures: list[Picture] = []
    start = draw(st.integers(0, 6))
    for _ in range(draw(st.integers(0, 2))):
        cut = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
        end = start + sum(cut) + len(cut) - 1
        if end > length:
            break
        # One name always has one number of rows, as a content key does.
        pictures.append(Picture(100 * sum(cut) + draw(st.integers(0, 1)), start, sum(cut), tuple(cut)))
        start = end + draw(st.integers(0, 4))
    sampled = draw(st.booleans())
    most = draw(st.integers(1, 12))
    sampling = {
        "max_tokens": most,
        "min_tokens": draw(st.integers(0, min(3, most))),
        "temperature": 1.0 if sampled else 0.0,
        "seed": draw(st.integers(0, 3)) if sampled else None,
        "stop_token_ids": tuple(draw(st.lists(st.integers(1, 8), max_size=2))),
        "ignore_eos": draw(st.booleans()),
        "presence_penalty": draw(st.sampled_from([0.0, 0.0, 1.0])),
        "prompt_logprobs": draw(st.sampled_from([None, None, None, 0])),
        "grammar": draw(st.sampled_from(["", "", "", "alternating"])),
        "n": draw(st.sampled_from([1, 1, 1, 2, 3])),
    }
    asked = order(ids, pictures, salt=draw(st.sampled_from(["", "", "x"])), priority=draw(st.integers(-1, 1)))
    deadline = draw(st.sampled_from([None, None, None, 5.0, 20.0]))
    return replace(asked, sampling=Sampling(**sampling), deadline=deadline)


class AnyOrderOfEvents(RuleBasedStateMachine):
    """Everything that can reach a scheduler, in any order, over caches that are often too tight for all."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = simulation()
        self.now = 0.0

    @initialize(
        blocks=st.integers(3, 16),
        block_size=st.sampled_from([1, 2, 4]),
        max_running=st.integers(1, 5),
        extra=st.integers(0, 12),
        prefix_cache=st.booleans(),
        keep_media_whole=st.booleans(),
        overlap=st.booleans(),
    )
    def begin(self, blocks: int, block_size: int, max_running: int, extra: int, **more: bool) -> None:
        self.engine = simulation(
            blocks=blocks,
            block_size=block_size,
            max_running=max_running,
            step_tokens=max_running + extra,
            **more,
        )

    def open_requests(self) -> list[int]:
        return [id for id, outcome in self.engine.outcomes.items() if not outcome.over]

    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        asked = data.draw(orders(self.engine.limits.max_context))
        self.engine.submit(asked, nowhere=data.draw(st.integers(0, len(asked.pictures))))

    @precondition(lambda self: self.open_requests())
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self.open_requests()))
        pictures = self.engine.outcomes[id].order.pictures
        if pictures:
            item = data.draw(st.integers(0, len(pictures) - 1))
            self.engine.land(id, item, data.draw(st.integers(0, pictures[item].rows)))

    @precondition(lambda self: self.engine.wanted)
    @rule(data=st.data())
    def place(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self.engine.wanted))
        self.engine.place(id, *(data.draw(st.integers(0, p.rows)) for p in self.engine.outcomes[id].order.pictures))

    @precondition(lambda self: self.open_requests())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(self.open_requests())))

    @precondition(lambda self: self.open_requests())
    @rule(data=st.data())
    def abort_choice(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self.open_requests()))
        self.engine.abort_choice(id, data.draw(st.integers(0, len(self.engine.outcomes[id].tokens) - 1)))

    @rule()
    def abort_unknown(self) -> None:
        self.engine.scheduler.abort(999_999)
        self.engine.scheduler.landed(999_999, 0, 1)

    @rule(seconds=st.sampled_from([0.5, 3.0, 30.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        late = [id for id in self.open_requests() if (self.engine.outcomes[id].order.deadline or 1e9) <= self.now]
        self.engine.expire(self.now)
        assert all(self.engine.outcomes[id].failed == "DEADLINE_EXCEEDED" for id in late)

    @rule()
    def forget_cached(self) -> None:
        self.engine.scheduler.blocks.flush()

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.engine.step()

    @invariant()
    def nothing_is_lost(self) -> None:
        self.engine.scheduler.check_integrity()

    def teardown(self) -> None:
        self.engine.drain()


AnyOrderOfEvents.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase


@pytest.mark.parametrize("overlap", [False, True])
def test_thousands_of_requests_through_a_tight_cache_all_say_what_they_must(overlap: bool) -> None:
    rng = random.Random(7)
    engine = simulation(blocks=48, max_running=12, step_tokens=64, overlap=overlap)
    waiting: list[int] = []
    for _ in range(2000):
        pictures = [Picture(rng.randrange(20), 2, 6)] if rng.random() < 0.3 else []
        asked = order(
            text(rng.randrange(8, 60), rng.randrange(5)),
            pictures,
            priority=rng.randrange(2),
            max_tokens=rng.randrange(1, 10),
            n=rng.choice([1, 1, 1, 2]),
        )
        waiting.append(engine.submit(asked))
        if len(waiting) > 30:
            engine.land_all(waiting.pop(rng.randrange(len(waiting))))
        engine.step(check=False)
    engine.drain(check=False)
    assert engine.scheduler.counters.preemptions > 0, "the cache was not tight"
    assert engine.scheduler.counters.prefix_hit_tokens > 0, "nothing was shared"


@pytest.mark.parametrize("overlap", [False, True])
def test_ten_thousand_requests_end_once_each_and_nothing_is_left(overlap: bool) -> None:
    """Arrivals in bursts, aborts, deadlines, late rows, over a cache that holds a fraction of them."""
    rng = random.Random(11)
    engine = simulation(blocks=96, max_running=24, step_tokens=96, overlap=overlap)
    alive: list[int] = []
    clock = 0.0
    while len(engine.outcomes) < 10_000:
        for _ in range(rng.choice([0, 0, 1, 4, 16])):
            pictures = [Picture(rng.randrange(30), 1, 5)] if rng.random() < 0.2 else []
            asked = order(
                text(rng.randrange(6, 40), rng.randrange(8)),
                pictures,
                priority=rng.choice([0, 0, 0, 1]),
                max_tokens=rng.randrange(1, 7),
            )
            alive.append(engine.submit(replace(asked, deadline=clock + 15 if rng.random() < 0.05 else None)))
        while len(alive) > 60:
            id = alive.pop(rng.randrange(len(alive)))
            if rng.random() < 0.05 and not engine.outcomes[id].over:
                engine.abort(id)
            elif not engine.outcomes[id].over:
                engine.land_all(id)
        clock += 1.0
        engine.expire(clock)
        engine.step(check=False)
        if engine.steps % 500 == 0:
            engine.scheduler.check_integrity()
    engine.drain(check=False)
    ends = Counter(
        "failed" if outcome.failed else "aborted" if outcome.aborted else "ended"
        for outcome in engine.outcomes.values()
    )
    assert min(ends["failed"], ends["aborted"], ends["ended"]) > 10, ends
    assert engine.scheduler.counters.preemptions > 0


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


def test_media_kept_whole_are_computed_in_one_step_or_left_for_the_next() -> None:
    engine = simulation(max_running=2, step_tokens=10, keep_media_whole=True)
    id = engine.submit(order(text(30), [Picture(1, 4, 8), Picture(2, 14, 12)]))
    engine.land_all(id)
    counts = []
    while not engine.outcomes[id].over:
        step = engine.step()
        assert step is not None
        counts.append(step.plan.tokens)
    # 4 of text; the picture of 8 whole, and a token; one of text and then what fits of the picture of 12, which is
    # longer than a step beside another decode, so it is cut.
    assert counts[:2] == [4, 10]
    assert all(count <= 10 for count in counts)
    engine.check_over()


def test_media_kept_whole_wait_for_their_last_row() -> None:
    engine = simulation(keep_media_whole=True)
    id = engine.submit(order(text(12), [Picture(1, 4, 6)]))
    counts = []
    for landed in (0, 5, 6):
        engine.land(id, 0, landed)
        step = engine.step()
        counts.append(step.plan.tokens if step else 0)
    assert counts == [4, 0, 8]


def test_a_picture_that_needs_nearly_the_whole_step_is_not_kept_out_by_decodes() -> None:
    engine = simulation(blocks=64, max_running=4, step_tokens=16, keep_media_whole=True)
    for seed in range(3):
        engine.submit(order(text(4, seed), max_tokens=100))
    engine.step()
    id = engine.submit(order(text(16), [Picture(1, 0, 13)]))
    engine.land_all(id)
    run_until_over(engine, id, 20)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", range(8))
def test_an_abort_gives_everything_back_within_a_step(steps: int, overlap: bool) -> None:
    engine = simulation(step_tokens=8, overlap=overlap)
    id = engine.submit(order(text(20), [Picture(1, 4, 6)], n=2, max_tokens=20))
    engine.land_all(id)
    for _ in range(steps):
        engine.step()
    engine.abort(id)
    engine.scheduler.check_integrity()
    assert engine.scheduler.blocks.used == 0
    engine.step()
    assert engine.outcomes[id].released == 1


@pytest.mark.parametrize(
    ("wanted", "in_vain"),
    [
        pytest.param({"max_tokens": 6}, 0, id="an end that can be counted is known ahead"),
        pytest.param({"max_tokens": 50, "stop_token_ids": tuple(range(1, 20))}, 1, id="a stop token is not"),
    ],
)
def test_planning_ahead_costs_an_answer_one_token_in_vain_at_most(wanted: dict[str, Any], in_vain: int) -> None:
    computed = []
    for overlap in (False, True):
        engine = simulation(overlap=overlap)
        engine.submit(order(text(9), **wanted))
        engine.drain()
        computed.append(engine.computed)
    assert computed[1] - computed[0] == in_vain


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


def test_a_chunk_ends_before_the_first_row_that_has_not_landed() -> None:
    engine = simulation()
    id = engine.submit(order(text(12), [Picture(1, 4, 6)]))
    counts = []
    for landed in (0, 2, 6):
        engine.land(id, 0, landed)
        step = engine.step()
        counts.append(step.plan.tokens if step else 0)
    assert counts == [4, 2, 6]
    assert len(engine.outcomes[id].tokens[0]) == 1


def test_rows_of_a_second_item_do_not_help_past_the_first() -> None:
    engine = simulation()
    id = engine.submit(order(text(16), [Picture(1, 2, 3), Picture(2, 8, 3)]))
    engine.land(id, 1, 3)
    step = engine.step()
    assert step is not None
    assert step.plan.tokens == 2


def test_a_video_whose_runs_stand_apart_lands_run_by_run() -> None:
    engine = simulation()
    id = engine.submit(order(text(14), [Picture(1, 2, 6, (3, 3))]))
    counts = []
    for landed in (3, 4, 6):
        engine.land(id, 0, landed)
        step = engine.step()
        counts.append(step.plan.tokens if step else 0)
    assert counts == [6, 1, 7]


def test_a_request_whose_rows_are_late_holds_nobody_up() -> None:
    engine = simulation(max_running=2)
    late = engine.submit(order(text(12), [Picture(1, 0, 6)]))
    prompt = engine.submit(order(text(12, 3)))
    run_until_over(engine, prompt)
    assert not engine.outcomes[late].over
    engine.land_all(late)
    run_until_over(engine, late)


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


def test_choices_share_the_prompt_and_compute_it_once() -> None:
    engine = simulation(step_tokens=64)
    id = engine.submit(order(text(33), n=4, max_tokens=3, temperature=1.0, seed=5))
    computed = 0
    while not engine.outcomes[id].over:
        step = engine.step()
        assert step is not None
        computed += step.plan.tokens
    assert len({tuple(said) for said in engine.outcomes[id].tokens}) > 1
    assert computed == 33 + 2 + 3 * (1 + 2)
    engine.check_over()


def test_choices_follow_though_the_first_is_ended_before_its_prompt_is_computed() -> None:
    engine = simulation(step_tokens=8)
    id = engine.submit(order(text(33), n=3))
    engine.step()
    engine.abort_choice(id, 0)
    run_until_over(engine, id)
    engine.check_over()


def test_a_request_that_expires_fails_once_with_deadline_exceeded() -> None:
    engine = simulation()
    late = engine.submit(replace(order(text(6), max_tokens=50), deadline=10.0))
    other = engine.submit(replace(order(text(6), max_tokens=50), deadline=30.0))
    engine.step()
    assert engine.scheduler.next_deadline() == 10.0
    engine.expire(10.0)
    engine.expire(10.0)
    assert engine.outcomes[late].failed == "DEADLINE_EXCEEDED"
    assert not engine.outcomes[other].failed
    engine.drain()


@pytest.mark.parametrize("company", [0, 5])
def test_a_seed_repeats_its_tokens_whatever_the_company(company: int) -> None:
    engine = simulation(blocks=24, step_tokens=16)
    for seed in range(company):
        engine.submit(order(text(20, seed + 10), max_tokens=12))
    asked = order(text(14), temperature=1.0, seed=1234, n=2, max_tokens=12)
    id = engine.submit(asked)
    engine.drain()
    for choice in range(2):
        assert engine.outcomes[id].tokens[choice] == expected(asked, choice, engine.limits)[0]


def test_without_a_seed_two_requests_draw_differently() -> None:
    engine = simulation()
    asked = order(text(14), temperature=1.0, max_tokens=40)
    ids = [engine.submit(asked) for _ in range(2)]
    engine.drain()
    assert engine.outcomes[ids[0]].tokens != engine.outcomes[ids[1]].tokens


PICTURE, OTHER = Picture(1, 8, 8), Picture(2, 8, 8)


@pytest.mark.parametrize(
    ("second", "cached"),
    [
        pytest.param(order(text(24), [PICTURE]), 20, id="the same text and picture share all but the last token"),
        pytest.param(order(text(24), [OTHER]), 8, id="another picture shares only what stands before it"),
        pytest.param(order(text(24, 5), [PICTURE]), 0, id="another text before the picture shares nothing"),
        pytest.param(order(text(24), [PICTURE], salt="tenant"), 0, id="another tenant shares nothing"),
    ],
)
def test_blocks_are_shared_by_text_picture_and_tenant(second: Order, cached: int) -> None:
    engine = simulation()
    first = engine.submit(order(text(24), [PICTURE]))
    engine.land_all(first)
    run_until_over(engine, first)
    id = engine.submit(second)
    engine.land_all(id)
    run_until_over(engine, id)
    assert engine.outcomes[id].cached == cached
    engine.check_over()


@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_are_scored_whole_though_they_are_cached(overlap: bool) -> None:
    engine = simulation(step_tokens=7, overlap=overlap)
    for _ in range(3):
        id = engine.submit(order(text(30), prompt_logprobs=2, n=2))
        run_until_over(engine, id)
        assert engine.outcomes[id].cached == 0
        assert len(engine.outcomes[id].scored) == 29
    engine.drain()


def test_two_pictures_in_swapped_order_share_nothing_past_the_first_place() -> None:
    engine = simulation()
    there = order(text(32), [Picture(1, 8, 8), Picture(2, 20, 8)])
    swapped = order(text(32), [Picture(2, 8, 8), Picture(1, 20, 8)])
    for asked in (there, swapped):
        id = engine.submit(asked)
        engine.land_all(id)
        run_until_over(engine, id)
    assert engine.outcomes[2].cached == 8


def test_a_cached_picture_needs_no_rows() -> None:
    engine = simulation()
    first = engine.submit(order(text(24), [PICTURE]))
    engine.land_all(first)
    run_until_over(engine, first)
    again = engine.submit(order(text(24), [PICTURE]))
    run_until_over(engine, again)
    assert engine.outcomes[again].cached == 20


def test_rows_cut_at_another_place_are_not_shared() -> None:
    """The same placeholders and key, but another row of the picture at the block's start."""
    engine = simulation()
    whole = order(text(24), [Picture(1, 4, 12)])
    split = order(text(24), [Picture(1, 4, 12, (4, 8))])
    for asked in (whole, split):
        id = engine.submit(asked)
        engine.land_all(id)
        run_until_over(engine, id)
    assert engine.outcomes[2].cached <= 8
    engine.check_over()
