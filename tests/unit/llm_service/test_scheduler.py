"""The scheduler, driven in every order that arrivals, landings, aborts, deadlines and steps can come in."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llm_service.families.chunk_rule import ChunkRule
from llm_service.families.sight import SpanRule
from llm_service.request import Pooling, SamplingParams
from tests.unit.llm_service.hashed import EOS, Order, Picture
from tests.unit.llm_service.simulated import order, simulation, text


@st.composite
def orders(draw: st.DrawFn, context: int) -> Order:
    """Requests that share beginnings and pictures often, and fit the context."""
    pooling = draw(st.sampled_from([None, None, None, *Pooling]))
    length = draw(st.integers(1, context - (pooling is None)))
    ids = list(text(length, draw(st.integers(0, 2))))
    for end in draw(st.lists(st.integers(0, length - 1), max_size=3)):
        ids[end] = EOS  # a turn ends
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
        "repetition_penalty": draw(st.sampled_from([1.0, 1.0, 1.5])),
        "prompt_logprobs": draw(st.sampled_from([None, None, None, 0])),
        "bad_word_ids": tuple(
            draw(st.lists(st.lists(st.integers(0, 29), min_size=1, max_size=3).map(tuple), max_size=3))
        ),
        "allowed_mask": draw(st.sampled_from([b"", b"", b"", b"\x81\x42\x24\x18"])),
        "grammar": draw(st.sampled_from(["", "", "", "alternating"])),
        "n": draw(st.sampled_from([1, 1, 1, 2, 3])),
    }
    if pooling is not None:
        sampling = {"max_tokens": 1, "temperature": 0.0}
    asked = order(ids, pictures, salt=draw(st.sampled_from(["", "", "x"])), priority=draw(st.integers(-1, 1)))
    deadline = draw(st.sampled_from([None, None, None, 5.0, 20.0]))
    adapter = draw(st.sampled_from([0, 0, 1, 2, 3]))
    more = {"deadline": deadline, "adapter": adapter, "pooling": pooling, "session": draw(st.integers(0, 2))}
    return replace(asked, sampling=SamplingParams(**sampling), **more)


class AnyOrderOfEvents(RuleBasedStateMachine):
    """Everything that can reach a scheduler, in any order, over caches that are often too tight for all."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = simulation()
        self.now = 0.0
        self.sessions: dict[tuple[str, int], int] = {}
        self.ended_sessions = 0

    @initialize(
        blocks=st.integers(3, 16),
        block_size=st.sampled_from([1, 2, 4]),
        max_running=st.integers(1, 5),
        extra=st.integers(0, 12),
        prefix_cache=st.booleans(),
        keep_media_whole=st.booleans(),
        spans=st.sampled_from(
            [*3 * [SpanRule.NOWHERE], SpanRule.EVERYWHERE, SpanRule.BEYOND_WINDOWS, SpanRule.WHOLE_PROMPTS]
        ),
        forgets_answers=st.booleans(),
        host_blocks=st.sampled_from([0, 0, 2, 8]),
        overlap=st.booleans(),
        early_tokens=st.sampled_from([1, 1, 0, 4]),
        spare_slots=st.sampled_from([None, None, 0, 2]),
        state_chunk=st.sampled_from([1, 3, 4]),
        speculative_tokens=st.sampled_from([0, 0, 1, 4]),
        draft_rows=st.sampled_from([5, 16, 256]),
        decode_slowdown=st.sampled_from([0.0, 2.5]),
        max_loras=st.integers(1, 2),
        proposes=st.booleans(),
    )
    def begin(
        self,
        blocks: int,
        block_size: int,
        max_running: int,
        extra: int,
        spare_slots: int | None,
        speculative_tokens: int,
        draft_rows: int,
        proposes: bool,
        spans: SpanRule,
        host_blocks: int,
        **more: int,
    ) -> None:
        """Sequences have states where there is a number of slots for snapshots, and for states before drafts. Where
        prompts are computed whole there are none, and a step holds any prompt, as where media are."""
        rule = ChunkRule(SpanRule.NOWHERE if spans is SpanRule.WHOLE_PROMPTS and spare_slots is not None else spans)
        self.engine = simulation(
            blocks=blocks,
            block_size=block_size,
            max_running=max_running,
            step_tokens=max_running + extra + (not rule.may_end_in_run) * blocks * block_size,
            chunk_rule=rule,
            host_blocks=host_blocks if spare_slots is None else 0,
            state_slots=0 if spare_slots is None else max_running + spare_slots,
            speculative_tokens=speculative_tokens,
            draft_rows=draft_rows,
            proposes=proposes and speculative_tokens > 0,
            **more,
        )

    def open_requests(self) -> list[int]:
        return [id for id, outcome in self.engine.outcomes.items() if not outcome.over]

    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        asked = data.draw(orders(self.engine.limits.max_context))
        if asked.session:  # of one tenant, with a number that no other one had
            numbered = self.sessions.setdefault(
                (asked.salt, asked.session), len(self.sessions) + self.ended_sessions + 1
            )
            asked = replace(asked, session=numbered)
        self.engine.submit(asked, nowhere=data.draw(st.integers(0, len(asked.pictures))))

    @precondition(lambda self: self.open_requests())
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self.open_requests()))
        pictures = self.engine.outcomes[id].order.pictures
        if pictures:
            item = data.draw(st.integers(0, len(pictures) - 1))
            self.engine.land(id, item, data.draw(st.integers(0, pictures[item].rows)))

    @precondition(lambda self: self.engine.rows_needed)
    @rule(data=st.data())
    def place(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self.engine.rows_needed))
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

    @precondition(lambda self: self.open_requests())
    @rule(data=st.data(), slow=st.booleans())
    def read_scores_late(self, data: st.DataObject, slow: bool) -> None:
        id = data.draw(st.sampled_from(self.open_requests()))
        self.engine.take_prompt_logprobs(id)
        (self.engine.slow.add if slow else self.engine.slow.discard)(id)

    @rule()
    def abort_unknown(self) -> None:
        self.engine.scheduler.prompt_logprobs_taken(999_999, 1)
        self.engine.scheduler.abort(999_999)
        self.engine.scheduler.landed(999_999, 0, 1)

    @rule(seconds=st.sampled_from([0.5, 3.0, 30.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        late = [id for id in self.open_requests() if (self.engine.outcomes[id].order.deadline or 1e9) <= self.now]
        self.engine.expire(self.now)
        assert all(self.engine.outcomes[id].failed == "DEADLINE_EXCEEDED" for id in late)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def end_session(self, data: st.DataObject) -> None:
        number = self.sessions.pop(data.draw(st.sampled_from(sorted(self.sessions))))
        self.ended_sessions += 1
        self.engine.end_session(number)

    @rule()
    def the_engine_dies(self) -> None:
        self.engine.die()

    @rule()
    def memory_runs_out(self) -> None:
        self.engine.fails = True

    @rule(adapter=st.integers(1, 3))
    def unload(self, adapter: int) -> None:
        if adapter not in (self.engine.outcomes[id].order.adapter for id in self.open_requests()):
            self.engine.scheduler.adapter_slots.forget(adapter)

    @rule()
    def forget_cached(self) -> None:
        self.engine.scheduler.blocks.flush()

    def prompts_that_are_exchanged(self) -> list[int]:
        """Blocks are exchanged where these depend on nothing behind them, and the host has room."""
        possible = self.engine.scheduler.blocks.host.total and not self.engine.limits.chunk_rule.of_prompts
        return sorted(self.engine.outcomes) if possible else []

    @precondition(lambda self: self.prompts_that_are_exchanged())
    @rule(data=st.data(), first=st.integers(0, 2))
    def lend(self, data: st.DataObject, first: int) -> None:
        self.engine.lend(data.draw(st.sampled_from(self.prompts_that_are_exchanged())), first)

    @precondition(lambda self: self.prompts_that_are_exchanged())
    @rule(data=st.data())
    def await_blocks(self, data: st.DataObject) -> None:
        self.engine.await_blocks(data.draw(st.sampled_from(self.prompts_that_are_exchanged())))

    @precondition(lambda self: any(each.awaits_more for each in self.engine.exchanges.values()))
    @rule(data=st.data(), times=st.integers(1, 6))
    def blocks_arrive(self, data: st.DataObject, times: int) -> None:
        possible = [number for number, each in self.engine.exchanges.items() if each.awaits_more]
        number = data.draw(st.sampled_from(possible))
        for _ in range(times):
            self.engine.write_block(number)

    @precondition(lambda self: self.engine.exchanges)
    @rule(data=st.data())
    def end_exchange(self, data: st.DataObject) -> None:
        self.engine.end_exchange(data.draw(st.sampled_from(sorted(self.engine.exchanges))))

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.engine.step()

    @invariant()
    def nothing_is_lost(self) -> None:
        self.engine.scheduler.check_integrity()
        self.engine.check_exchanges()

    @invariant()
    def nothing_is_kept_for_sessions_that_are_over(self) -> None:
        kept_for = self.engine.scheduler.blocks._retained._by_session
        assert kept_for.keys() <= {*self.sessions.values()}

    def teardown(self) -> None:
        self.engine.drain()


AnyOrderOfEvents.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase


class ManyOrdersOfEvents(AnyOrderOfEvents):
    """The same, for longer."""


ManyOrdersOfEvents.TestCase.settings = settings(AnyOrderOfEvents.TestCase.settings, max_examples=100)
TestManyOrdersOfEvents = pytest.mark.soak(ManyOrdersOfEvents.TestCase)


_STATES = {"state_slots": 14, "state_chunk": 8}


@pytest.mark.parametrize(
    ("overlap", "requests"), [(True, 400), pytest.param(False, 1000, marks=pytest.mark.soak)], ids=["overlap", "long"]
)
@pytest.mark.parametrize(
    "more",
    [
        {},
        _STATES,
        {"speculative_tokens": 4},
        {"speculative_tokens": 4, **_STATES},
        {"max_loras": 3},
        {"speculative_tokens": 4, "proposes": True},
        {"host_blocks": 30},
        {"host_blocks": 30, "exchanges": True},
        {"chunk_rule": ChunkRule(SpanRule.WHOLE_PROMPTS), "blocks": 20, "max_running": 4, "speculative_tokens": 4},
        {"fails_every": 40, "host_blocks": 30, "max_loras": 3, "exchanges": True},
        {"fails_every": 40, "speculative_tokens": 4, **_STATES},
    ],
    ids=[
        "",
        "with states",
        "with drafts",
        "with both",
        "with adapters",
        "with a draft model",
        "with the host",
        "with other services",
        "of whole prompts",
        "with too little memory and other services",
        "with too little memory, states and drafts",
    ],
)
def test_hundreds_of_requests_through_a_tight_cache_all_say_what_they_must(
    more: dict[str, int], overlap: bool, requests: int
) -> None:
    rng = random.Random(7)
    given = {"blocks": 48, "max_running": 12, "step_tokens": 64, "overlap": overlap} | more
    fails_every, exchanges = given.pop("fails_every", 0), given.pop("exchanges", False)
    engine = simulation(**given)
    waiting: list[int] = []
    for _ in range(requests):
        engine.fails = bool(fails_every) and rng.randrange(fails_every) == 0
        pictures = [Picture(rng.randrange(20), 2, 6)] if rng.random() < 0.3 else []
        asked = order(
            text(rng.randrange(8, 60), rng.randrange(5)),
            pictures,
            priority=rng.randrange(2),
            max_tokens=rng.randrange(1, 16),
            n=rng.choice([1, 1, 1, 2]),
            adapter=rng.randrange(8) if "max_loras" in more else 0,
        )
        waiting.append(engine.submit(asked))
        if len(waiting) > 30:
            engine.land_all(waiting.pop(rng.randrange(len(waiting))))
        for _ in range(2 * exchanges):
            engine.exchange(rng)
        engine.step(check=False)
    engine.drain(check=False)
    assert engine.scheduler.counters.preemptions > 0, "the cache was not tight"
    assert engine.scheduler.counters.prefix_hit_tokens > 0, "nothing was shared"
    if "max_loras" in more:
        assert engine.scheduler.state().adapter_fills > 8, "slots were never filled anew"
    if "host_blocks" in more and not fails_every:
        assert engine.scheduler.state().kv_blocks_loaded > 100, "nothing came back"
    if "speculative_tokens" in more and not (overlap and "proposes" in more):
        counters = engine.scheduler.counters
        assert 0 < counters.accepted_draft_tokens < counters.draft_tokens, "drafts were right, and others wrong"


@pytest.mark.parametrize(
    ("overlap", "requests"),
    [
        (True, 2_000),
        pytest.param(True, 5_000, marks=pytest.mark.soak),
        pytest.param(False, 5_000, marks=pytest.mark.soak),
    ],
)
def test_thousands_of_requests_end_once_each_and_nothing_is_left(overlap: bool, requests: int) -> None:
    """Arrivals in bursts, aborts, deadlines, late rows, over a cache that holds a fraction of them."""
    rng = random.Random(11)
    engine = simulation(blocks=96, max_running=24, step_tokens=96, overlap=overlap)
    alive: list[int] = []
    clock = 0.0
    while len(engine.outcomes) < requests:
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


@pytest.mark.parametrize("overlap", [False, True])
def test_whoever_waits_for_a_slot_is_not_overtaken_by_those_with_adapters_but_by_those_without(overlap: bool) -> None:
    engine = simulation(blocks=256, max_running=8, step_tokens=64, max_loras=1, overlap=overlap)
    first = engine.submit(order(text(8), adapter=1, max_tokens=20))
    engine.step()
    second = engine.submit(order(text(9, 1), adapter=2, max_tokens=4))
    engine.step()
    for _ in range(30):  # whoever has the adapter that is in the slot would keep it there for ever
        engine.submit(order(text(8, 2), adapter=1, max_tokens=20))
    plain = engine.submit(order(text(8, 3), max_tokens=4))
    while not engine.outcomes[second].over:
        engine.step()
    assert engine.outcomes[first].over
    assert engine.outcomes[plain].over, "it needs no slot"
    assert sum(outcome.started for outcome in engine.outcomes.values()) == 3, "the others wait their turn"
    engine.drain()


def test_who_cannot_have_a_slot_in_a_step_is_not_looked_at_any_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at what is cached of its prompt, and at everybody who runs, would make the step longer."""
    engine = simulation(blocks=256, max_running=8, step_tokens=64, max_loras=1)
    engine.submit(order(text(8), adapter=1, max_tokens=20))
    engine.step()
    for number in range(30):
        engine.submit(order(text(8, number), adapter=2, max_tokens=4))
    looks, match = [], engine.scheduler.blocks.match
    monkeypatch.setattr(engine.scheduler.blocks, "match", lambda each: looks.append(each) or match(each))
    engine.step()
    assert len(looks) == 1
    monkeypatch.undo()
    engine.drain()


def test_who_only_waits_for_rows_gives_its_slot_up() -> None:
    engine = simulation(blocks=64, max_running=4, step_tokens=64, max_loras=1)
    late = engine.submit(order(text(20), [Picture(1, 10, 6)], adapter=1))
    engine.step()
    assert engine.outcomes[late].started, "its first tokens are computed"
    other = engine.submit(order(text(8, 1), adapter=2))
    while not engine.outcomes[other].over:
        assert engine.step() is not None, "it waits for ever"
    engine.drain()


def test_prompts_of_two_adapters_share_no_block_and_those_of_one_do() -> None:
    engine = simulation(blocks=64, max_running=1, step_tokens=64, max_loras=2)
    cached = []
    for adapter in (0, 1, 2, 1, 0):
        id = engine.submit(order(text(24), adapter=adapter))
        while not engine.outcomes[id].over:
            engine.step()
        cached.append(engine.outcomes[id].cached)
    assert cached[:3] == [0, 0, 0]
    assert cached[3] == cached[4] > 0
    engine.drain()


@pytest.mark.parametrize("overlap", [False, True])
def test_logprobs_of_a_prompt_that_are_lost_are_computed_again(overlap: bool) -> None:
    engine = simulation(blocks=48, max_running=4, step_tokens=8, overlap=overlap)
    engine.submit(order(text(40, 0), (), max_tokens=3, prompt_logprobs=0))
    for number in range(6):
        engine.fails = number == 3
        engine.step()
    engine.drain()
    assert len(engine.outcomes[1].scored) == 39


def test_sequences_divide_the_room_for_drafts_and_what_one_leaves_is_the_others() -> None:
    engine = simulation(max_running=4, speculative_tokens=8, draft_rows=14)
    for seed in range(4):
        engine.submit(order(text(4, seed), max_tokens=2 if not seed else 24))
    engine.step()
    step = engine.step()
    assert step is not None
    assert sorted(count for _, count in step.work) == [1, 4, 4, 5], "one has no token behind the next to draft"
    engine.drain()
