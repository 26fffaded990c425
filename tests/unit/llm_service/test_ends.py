"""How requests and their choices go on and end, and that everything is given back."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import pytest

from llm_service.engine.matchers import Matcher
from tests.unit.llm_service import simulated
from tests.unit.llm_service.hashed import EOS, Alternating, Picture, expected
from tests.unit.llm_service.simulated import order, run_until_over, simulation, text


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


@dataclass(slots=True)
class GivesUp(Alternating):
    """A structure that meets a limit while it works out what may come third: an end token is all that it allows."""

    asked: int = 0

    def compute_bitmask(self) -> bytes:
        self.asked += 1
        return (1 << EOS).to_bytes(4, "little") if self.is_error() else Alternating.compute_bitmask(self)

    def is_error(self) -> bool:
        return self.asked >= 3


@pytest.mark.parametrize("min_tokens", [0, 10])
def test_a_structure_that_can_not_be_followed_on_fails_its_request_and_does_not_cut_the_answer_off(
    monkeypatch: pytest.MonkeyPatch, min_tokens: int
) -> None:
    def gives_up(*_: object) -> Future[Matcher]:
        made: Future[Matcher] = Future()
        made.set_result(GivesUp())
        return made

    monkeypatch.setattr(simulated, "alternating", gives_up)
    engine = simulation()
    id = engine.submit(order(text(9), max_tokens=20, ignore_eos=False, grammar="g", min_tokens=min_tokens))
    while not engine.outcomes[id].over:
        engine.step()
    assert (engine.outcomes[id].failed, engine.outcomes[id].ended) == ("STRUCTURE_TOO_COMPLEX", [""])


ODD, EVEN = tuple(range(1, 30, 2)), tuple(range(2, 30, 2))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("stops", "said"), [(ODD, 0), (EVEN, 1)])
def test_a_structure_that_leaves_nothing_but_stop_tokens_before_min_tokens_fails_its_request_alone(
    stops: tuple[int, ...], said: int, overlap: bool
) -> None:
    """The structure wants an odd token, then an even one."""
    engine = simulation(overlap=overlap)
    other = engine.submit(order(text(7), max_tokens=9))
    id = engine.submit(order(text(9), n=2, max_tokens=20, grammar="g", min_tokens=3, stop_token_ids=(EOS, *stops)))
    while not engine.outcomes[id].over:
        engine.step()
    assert (engine.outcomes[id].failed, engine.outcomes[id].ended) == ("MIN_TOKENS_UNREACHABLE", ["", ""])
    assert len(engine.outcomes[id].tokens[0]) == said
    run_until_over(engine, other)
    engine.step()
    assert engine.outcomes[id].released == engine.outcomes[other].released == 1
    assert engine.scheduler.blocks.used == 0


def test_min_tokens_and_a_structure_that_leaves_another_token_go_together() -> None:
    engine = simulation()
    engine.submit(order(text(9), max_tokens=20, grammar="g", min_tokens=3, stop_token_ids=(EOS, *ODD[:-1])))
    engine.drain()


@pytest.mark.parametrize("over", [False, True])
def test_a_session_that_is_over_before_its_request_is_keeps_nothing_of_it(over: bool) -> None:
    engine = simulation()
    id = engine.submit(order(text(33), n=2, max_tokens=6, session=7))
    engine.step()
    if over:
        engine.scheduler.end_session(7)
    run_until_over(engine, id)
    assert (len(engine.scheduler.blocks._retained) == 0) == over


def test_deadlines_of_requests_that_are_over_are_not_kept_until_they_come() -> None:
    engine = simulation()
    ids = [engine.submit(replace(order(text(6)), deadline=1e9 + number)) for number in range(300)]
    for id in ids[:-1]:
        engine.abort(id)
    late = engine.submit(replace(order(text(6)), deadline=5.0))
    assert len(engine.scheduler._queues._deadlines) <= 100
    assert engine.scheduler.next_deadline() == 5.0
    engine.expire(5.0)
    assert engine.outcomes[late].failed == "DEADLINE_EXCEEDED"
    assert engine.scheduler.next_deadline() == 1e9 + 299
    engine.drain()


def test_no_matcher_is_made_for_a_request_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Future[Matcher]] = []

    def late(*_: object) -> Future[Matcher]:
        asked.append(Future())
        return asked[-1]

    monkeypatch.setattr(simulated, "alternating", late)
    engine = simulation()
    gone, other = (engine.submit(order(text(9), n=2, max_tokens=3, grammar="alternating")) for _ in range(2))
    engine.abort(gone)
    assert [each.cancelled() for each in asked] == [True, True, False, False]
    for each in asked[2:]:
        each.set_result(Alternating())
    engine.drain()
    assert engine.outcomes[other].over


ODD_RUNS, EVEN_RUNS = (tuple((word,) for word in range(first, 30, 2)) for first in (1, 2))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize(
    ("bad_word_ids", "said"),
    [
        pytest.param(ODD_RUNS, 0, id="at once"),
        pytest.param((*EVEN_RUNS, (0,)), 1, id="later"),
        pytest.param(
            tuple((word, *each) for word in range(1, 30, 2) for each in (*EVEN_RUNS, (0,))), 1, id="behind a word"
        ),
    ],
)
def test_a_structure_that_bad_words_leave_nothing_of_fails_its_answer_and_no_other(
    bad_word_ids: tuple[tuple[int, ...], ...], said: int, drafts: int, overlap: bool
) -> None:
    engine = simulation(overlap=overlap, speculative_tokens=drafts)
    held = engine.submit(order(text(9), grammar="alternating", bad_word_ids=bad_word_ids, max_tokens=50))
    other = engine.submit(order(text(5), bad_word_ids=bad_word_ids, max_tokens=12))
    engine.drain()
    assert engine.outcomes[held].failed == "BAD_WORDS_UNAVOIDABLE"
    assert [len(tokens) for tokens in engine.outcomes[held].tokens] == [said]
    assert not engine.outcomes[other].failed
    engine.check_over()


@pytest.mark.parametrize(
    ("seed", "bound"),
    [
        pytest.param(14, {"grammar": "alternating"}, id="a grammar"),
        pytest.param(26, {"grammar": "alternating"}, id="a grammar that becomes too complex"),
        pytest.param(1, {"allowed_mask": b"\x81\x42\x24\x18", "bad_word_ids": ((3, 4), (4, 5))}, id="allowed tokens"),
    ],
)
def test_steps_overlap_beside_an_answer_that_is_held_to_something(seed: int, bound: dict[str, Any]) -> None:
    """Its company is planned ahead as if it were not there; it says what it would say alone."""
    engine = simulation(overlap=True)
    asked = [order(text(9), max_tokens=24), order(text(7, 3), max_tokens=24, temperature=1.0, seed=seed, **bound)]
    ids = [engine.submit(each) for each in asked]
    engine.step()
    while not any(engine.outcomes[id].over for id in ids):
        engine.step()
        assert any(engine.outcomes[id].over for id in ids) or len(engine._under_way) == 1, "one is planned ahead"
    engine.drain()
    for id, each in zip(ids, asked, strict=True):
        tokens, ended = expected(each, 0, engine.limits)
        outcome = engine.outcomes[id]
        assert (outcome.tokens[0], outcome.ended[0] or "failed") == (tokens, ended)
        assert len(tokens) > 6
    engine.check_over()
