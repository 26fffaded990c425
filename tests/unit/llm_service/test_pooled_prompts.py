"""A prompt whose embedding is wanted, in the scheduler: it ends when it is computed, and has what its hidden states
make, whatever the chunks, the company and the caches."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from llm_service.engine.limits import SchedulerLimits
from llm_service.engine.messages import Add
from llm_service.engine.sequence import Sequence
from llm_service.families.chunk_rule import ChunkRule
from llm_service.families.sight import SpanRule
from llm_service.request import Pooling, SamplingParams
from tests.unit.llm_service.hashed import Picture, expected_vector
from tests.unit.llm_service.simulated import Simulation, order, simulation, text

EACH = pytest.mark.parametrize("pooling", Pooling)
SETTINGS: list[dict[str, Any]] = [
    {},
    {"overlap": True},
    {"step_tokens": 9, "overlap": True},
    {"step_tokens": 9, "state_slots": 12, "state_chunk": 4},
    {"step_tokens": 200, "chunk_rule": ChunkRule(SpanRule.WHOLE_PROMPTS)},
    {"speculative_tokens": 2, "proposes": True},
]


def embed(engine: Simulation, *asked: Any) -> list[bytes]:
    ids = [engine.submit(each) for each in asked]
    engine.drain()
    return [engine.outcomes[id].pooled for id in ids]


@EACH
@pytest.mark.parametrize("given", SETTINGS, ids=str)
def test_it_has_what_its_hidden_states_make(pooling: Pooling, given: dict[str, Any]) -> None:
    engine = simulation(**given)
    asked = [order(text(50), [Picture(1, 7, 20)], pooling=pooling), order(text(1, 3), pooling=pooling)]
    beside = order(text(30, 1), max_tokens=20)
    id = engine.submit(beside)
    assert embed(engine, *asked) == [expected_vector(each, engine.limits) for each in asked]
    assert len(engine.outcomes[id].tokens[0]) == 20
    assert engine.scheduler.counters.generated_tokens == 20, "an embedding is no token"


@EACH
def test_blocks_are_taken_from_the_cache_where_no_hidden_state_of_theirs_counts(pooling: Pooling) -> None:
    engine = simulation()
    asked = order(text(40), pooling=pooling)
    found = embed(engine, asked, order(text(40), pooling=pooling))
    assert found == [expected_vector(asked, engine.limits)] * 2
    again = engine.submit(asked)
    engine.drain()
    assert engine.outcomes[again].pooled == found[0]
    assert engine.outcomes[again].cached == (36 if pooling is Pooling.LAST else 0)
    answer = engine.submit(order(text(40)))
    engine.drain()
    assert engine.outcomes[answer].cached == 36, "what it computed is there for others"


@EACH
@pytest.mark.parametrize("overlap", [False, True])
def test_one_that_was_preempted_counts_no_hidden_state_twice(pooling: Pooling, overlap: bool) -> None:
    engine = simulation(blocks=16, step_tokens=12, overlap=overlap, prefix_cache=False)
    asked = order(text(60), pooling=pooling)
    id = engine.submit(asked)
    engine.step()
    engine.step()
    first = engine.submit(order(text(20, 1), priority=1, max_tokens=30))
    engine.drain()
    assert engine.scheduler.counters.preemptions > 0
    assert engine.outcomes[id].pooled == expected_vector(asked, engine.limits)
    assert len(engine.outcomes[first].tokens[0]) == 30


def test_sums_of_steps_from_before_it_was_put_back_are_not_counted() -> None:
    """Such a step may be over when it has begun anew."""
    asked = Add(
        id=1,
        token_ids=array("i", [5, 6]).tobytes(),
        positions=np.tile(np.arange(2, dtype=np.int32), (3, 1)).tobytes(),
        mrope_delta=0,
        items=[],
        sampling=SamplingParams(max_tokens=1),
        salt="",
        priority=0,
        deadline=None,
        pooling=Pooling.MEAN,
    )
    (sequence,) = Sequence.of(asked, SchedulerLimits(1, 9, 9), (), arrival=1, seed=0)
    one, other = (np.full(3, value, np.float32).tobytes() for value in (1.0, 8.0))
    sequence.start(0)
    sequence.add_pooled(one, 1)
    sequence.preempt()
    sequence.start(0)
    sequence.add_pooled(one, 1)
    sequence.add_pooled(other, 2)
    assert np.frombuffer(sequence.take_pooled(), np.float32).tolist() == [4.0] * 3


@EACH
def test_the_next_engine_computes_it_anew(pooling: Pooling) -> None:
    engine = simulation(step_tokens=8)
    asked = order(text(50), pooling=pooling)
    id = engine.submit(asked)
    for _ in range(3):
        engine.step()
    engine.die()
    engine.drain()
    assert engine.outcomes[id].pooled == expected_vector(asked, engine.limits)


def test_a_prompt_may_be_as_long_as_the_context() -> None:
    engine = simulation(blocks=4, step_tokens=7)
    assert engine.limits.max_context == 16
    asked = order(text(16), pooling=Pooling.LAST)
    assert embed(engine, asked) == [expected_vector(asked, engine.limits)]
    longer = engine.submit(order(text(17), pooling=Pooling.LAST))
    engine.drain()
    assert engine.outcomes[longer].failed == "PROMPT_TOO_LONG"


def test_one_that_is_given_up_in_the_middle_holds_nothing() -> None:
    engine = simulation(step_tokens=8, overlap=True)
    id = engine.submit(order(text(50), pooling=Pooling.MEAN))
    engine.step()
    engine.step()
    engine.abort(id)
    engine.drain()
    assert engine.outcomes[id].released == 1
    assert not engine.outcomes[id].pooled
