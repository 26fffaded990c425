"""A choice that is resumed behind any of its tokens says the rest of what it would have said, and ends where it would
have ended."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from common.errors import InvalidInput
from llm_service.engine.finish import resumed_end
from llm_service.engine.matchers import Matcher
from tests.unit.llm_service.hashed import EOS, Order, Picture, alternating, expected
from tests.unit.llm_service.simulated import Simulation, order, run_until_over, simulation, text

PICTURES = (Picture(1, 3, 9, (4, 5)), Picture(2, 15, 6))
ORDERS = {
    "greedy": order(text(30), max_tokens=9),
    "drawn": order(text(30), max_tokens=9, temperature=1.0, seed=5),
    "penalised": order(text(30), max_tokens=9, presence_penalty=1.0, repetition_penalty=1.5),
    "structured": order(text(30, 9), max_tokens=9, grammar="alternating"),
    "stopped": order(text(30), max_tokens=30, ignore_eos=False, stop_token_ids=(3, 4, 5), min_tokens=4),
    "with pictures": order(text(30), PICTURES, max_tokens=9),
    "scored": order(text(30), max_tokens=5, prompt_logprobs=0),
    "at the end of the context": order(text(250), max_tokens=100),
}


def complete(engine: Simulation, asked: Order) -> list[list[int]]:
    return [expected(asked, choice, engine.limits)[0] for choice in range(asked.sampling.n)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ORDERS)
def test_an_answer_that_was_cut_anywhere_goes_on_as_if_it_had_not_been(name: str, overlap: bool) -> None:
    asked = ORDERS[name]
    (whole,) = complete(simulation(overlap=overlap), asked)
    for cut in range(len(whole) + 1):
        engine = simulation(overlap=overlap)
        id = engine.submit(asked, said=[whole[:cut]])
        engine.drain()
        outcome = engine.outcomes[id]
        assert outcome.tokens == [whole], f"cut behind {cut}"
        assert outcome.ended[0] in ("stop", "length", "structure")
        assert engine.scheduler.counters.generated_tokens == len(whole) - cut
        assert len(outcome.scored) == (29 if name == "scored" and not cut else 0)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_choices_of_a_request_are_resumed_each_from_where_it_was(overlap: bool) -> None:
    asked = order(text(21), PICTURES[:1], n=3, max_tokens=8, temperature=1.0, seed=2)
    whole = complete(simulation(), asked)
    for cuts in ((0, 3, 8), (8, 8, 8), (8, 0, 0), (5, 0, 7), (1, 1, 1)):
        engine = simulation(overlap=overlap)
        id = engine.submit(asked, said=[said[:cut] for said, cut in zip(whole, cuts, strict=True)])
        engine.drain()
        assert engine.outcomes[id].tokens == whole
        assert engine.outcomes[id].started == (cuts != (8, 8, 8))


def test_what_is_cached_of_prompt_and_output_is_not_computed_again() -> None:
    engine = simulation(block_size=4)
    asked = order(text(20), max_tokens=20)
    (whole,) = complete(engine, asked)
    run_until_over(engine, engine.submit(asked))
    before = engine.computed
    id = engine.submit(asked, said=[whole[:15]])
    run_until_over(engine, id)
    assert engine.outcomes[id].cached == 20, "the prompt is all that is told"
    assert engine.computed - before == 35 % 4 + len(whole) - 15 - 1


@pytest.mark.parametrize("behind", [[EOS, 5], [EOS, EOS]])
def test_nothing_can_have_been_said_behind_an_end(behind: list[int]) -> None:
    engine = simulation()
    id = engine.submit(order(text(9), max_tokens=20, ignore_eos=False), said=[behind])
    engine.step()
    assert engine.outcomes[id].failed == "BAD_RESUME"
    assert engine.outcomes[id].released == 1


@pytest.mark.parametrize(("said", "failed", "ended"), [(0, "PROMPT_TOO_LONG", ""), (3, "", "length")])
def test_what_is_too_long_for_the_next_engine_is_told_and_waits_for_nothing(said: int, failed: str, ended: str) -> None:
    engine = simulation(blocks=8, block_size=4)
    id = engine.submit(order(text(32 - said), max_tokens=20), said=[range(1, 1 + said)])
    assert engine.step() is None
    outcome = engine.outcomes[id]
    assert (outcome.failed, outcome.ended, outcome.released) == (failed, [ended], 1)


@pytest.mark.parametrize("seed", range(8))
def test_however_often_engines_die_every_answer_is_the_one_that_it_would_have_been(seed: int) -> None:
    chance = random.Random(seed)
    engine = simulation(blocks=24, max_running=4, step_tokens=24, overlap=bool(seed % 2))
    for number in range(8):
        pictures = (Picture(number % 3, 2, 5),) if number % 2 else ()
        drawn = {"temperature": 1.0, "seed": number} if number % 3 else {}
        engine.submit(order(text(10 + number, number % 2), pictures, n=1 + number % 2, max_tokens=12, **drawn))
    deaths = 0
    while any(not outcome.over for outcome in engine.outcomes.values()):
        for id in engine.outcomes:
            if chance.random() < 0.2 and not engine.outcomes[id].over:
                engine.land_all(id)
        for id in list(engine.rows_needed):
            if chance.random() < 0.5:
                engine.place(id)
        for _ in range(chance.randrange(6)):
            engine.step()
        if deaths < 20:
            engine.die()
            deaths += 1
    assert deaths == 20 or all(outcome.over for outcome in engine.outcomes.values())
    engine.drain()


def test_what_was_said_is_told_from_the_prompt_where_both_are_computed_at_once() -> None:
    engine = simulation()
    engine.submit(order(text(9), max_tokens=20), said=[[5, 6, 7]])
    step, _ = engine.scheduler.schedule()
    assert step is not None
    assert [(chunk.count, chunk.answers, chunk.decodes) for chunk in step.plan.chunks] == [(12, 3, False)]


class MadeMeanwhile(Future[Matcher]):
    """A matcher that is there right after it was looked for first: the thread that makes it asks nobody. It stands
    behind `output`, unless that is not of the form."""

    def __init__(self, output: Sequence[int], *, fits: bool) -> None:
        super().__init__()
        self._output, self._fits = output, fits

    def done(self) -> bool:
        was_done = super().done()
        if not was_done and self._fits:
            self.set_result(alternating(None, self._output).result())
        elif not was_done:
            self.set_exception(InvalidInput("it has another form", reason="BAD_RESUME"))
        return was_done


@pytest.mark.parametrize(("fits", "failed", "ended"), [(False, "BAD_RESUME", ""), (True, "", "stop")])
def test_what_was_said_is_checked_whenever_its_grammar_is_there(fits: bool, failed: str, ended: str) -> None:
    engine = simulation()
    engine.scheduler._match = lambda _, output: MadeMeanwhile(output, fits=fits)
    said = complete(engine, ORDERS["structured"])[0][:3]
    asked = order(text(30, 9), max_tokens=9, grammar="alternating", ignore_eos=False, stop_token_ids=said[-1:])
    id = engine.submit(asked, said=[said])
    for _ in range(4):
        engine.step()
    outcome = engine.outcomes[id]
    assert (outcome.failed, outcome.ended[0], outcome.tokens, outcome.started) == (failed, ended, [said], 0)


class Compared(int):
    """A token that counts how often it is compared with others."""

    times = 0

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return int(self) == other

    __hash__ = int.__hash__


def test_what_was_said_is_looked_through_once_however_many_tokens_would_end_it() -> None:
    """A thousand of them behind a hundred thousand held every request up for seconds."""
    engine = simulation()
    said = [5] * 20
    id = engine.submit(order(text(9), max_tokens=30, stop_token_ids=tuple(range(6, 29))), said=[said])
    (sequence,) = engine.scheduler._queues.requests[id]
    sequence.stop_ids, Compared.times = tuple(map(Compared, sequence.stop_ids)), 0
    assert resumed_end(sequence) == ""
    assert Compared.times <= 2 * len(sequence.stop_ids), "once for the last token, which may end it"
    engine.abort(id)
