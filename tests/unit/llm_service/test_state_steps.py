"""Random steps of an engine whose layers keep states: every token is that of a sequence computed from scratch."""

from __future__ import annotations

import random

import pytest

from tests.unit.llm_service.hashed import EOS, Order, Picture
from tests.unit.llm_service.simulated import Simulation, order, simulation, text


def any_order(rng: random.Random) -> Order:
    """Conversations that branch: a few system prompts and pictures, turns behind them, and all that is asked anew."""
    prompt = [*text(rng.randrange(4, 30), rng.randrange(3)), EOS]
    pictures = [Picture(rng.randrange(4), len(prompt), 9)] if rng.random() < 0.4 else []
    prompt += [1] * 9 * len(pictures)
    for _ in range(rng.randrange(4)):
        prompt += [*text(rng.randrange(1, 20), rng.randrange(3)), EOS]
    prompt += text(rng.randrange(1, 20), rng.randrange(40))
    given = {"max_tokens": rng.randrange(1, 40), "n": rng.choice([1, 1, 1, 3]), "priority": rng.randrange(2)}
    return order(prompt, pictures, salt=rng.choice(["", "", "x"]), **given)


def any_engine(rng: random.Random) -> Simulation:
    running = rng.choice([2, 5, 9])
    return simulation(
        blocks=rng.choice([48, 70, 160]),
        block_size=rng.choice([2, 4]),
        max_running=running,
        step_tokens=running + rng.choice([8, 40, 120]),
        overlap=rng.random() < 0.5,
        keep_media_whole=rng.random() < 0.2,
        state_slots=running + rng.choice([0, 1, 4, 20]),
        state_chunk=rng.choice([1, 4, 8]),
        decode_slowdown=rng.choice([0.0, 2.5]),
        takes=lambda decodes, tokens: 0.01 + 0.002 * tokens,
    )


def turn(engine: Simulation, rng: random.Random) -> None:
    """A step, and what may happen before it."""
    open_ones = [id for id, outcome in engine.outcomes.items() if not outcome.over]
    if len(open_ones) < 12 and rng.random() < 0.3:
        asked = any_order(rng)
        if len(asked.prompt) + asked.sampling.max_tokens < engine.limits.max_context:
            engine.submit(asked)
    elif open_ones and rng.random() < 0.5:
        engine.land_all(rng.choice(open_ones))
    elif open_ones and rng.random() < 0.02:
        engine.abort(rng.choice(open_ones))
    elif rng.random() < 0.002:
        engine.scheduler.blocks.flush()
    elif rng.random() < 0.002:
        engine.die()
    engine.step(check=rng.random() < 0.05)


def run(seed: int, turns: int) -> tuple[int, int, int]:
    """Steps, tokens that were in the cache, and preemptions; all that was asked has been served."""
    rng, steps, hits, preempted = random.Random(seed), 0, 0, 0
    while steps < turns:
        engine = any_engine(rng)
        while engine.steps < 400:
            turn(engine, rng)
        counters = engine.scheduler.counters
        hits, preempted = hits + counters.prefix_hit_tokens, preempted + counters.preemptions
        engine.drain(check=False)
        steps += engine.steps
    return steps, hits, preempted


@pytest.mark.parametrize(("seed", "steps"), [(1, 1000), pytest.param(2, 4000, marks=pytest.mark.soak)])
def test_thousands_of_steps_leak_no_slot_and_read_no_other_state(seed: int, steps: int) -> None:
    _, hits, preempted = run(seed, steps)
    assert hits > 0
    assert preempted > 0
