"""How much of prompts a step computes beside running answers, on devices whose steps take what a test says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llm_service.engine.step_pace import StepPace
from tests.unit.llm_service.hashed import Picture
from tests.unit.llm_service.simulated import Simulation, order, simulation, text

SLOWDOWN = 2.5
ALONE = 0.04
A_TOKEN = 0.003


def processor(decodes: int, tokens: int) -> float:
    """Seconds of a step: weights are read once, and each prompt token adds its own."""
    return ALONE + 0.002 * (decodes - 1 if decodes else 0) + A_TOKEN * tokens


def steps(
    pace: StepPace, count: int, decodes: int = 1, device: Callable[[int, int], float] = processor
) -> list[tuple[int, float]]:
    """So many steps beside a prompt without end: tokens of it, and seconds."""
    found = []
    for _ in range(count):
        tokens = pace.prompt_tokens(decodes)
        assert tokens is not None
        seconds = device(decodes, tokens)
        pace.learn(decodes, tokens, seconds)
        found.append((tokens, seconds))
    return found


def mean(found: list[tuple[int, float]]) -> float:
    return sum(seconds for _, seconds in found) / len(found)


def learnt(**more: int) -> StepPace:
    pace = StepPace(SLOWDOWN, **more)
    pace.learn(0, 200, processor(0, 200))
    pace.learn(1, 0, processor(1, 0))
    return pace


def test_nothing_is_bounded_without_a_slowdown_or_without_decodes() -> None:
    assert StepPace(0.0).prompt_tokens(3) is None
    assert learnt().prompt_tokens(0) is None


def test_decodes_are_computed_alone_until_it_is_known_how_long_they_take() -> None:
    pace = StepPace(SLOWDOWN)
    pace.learn(0, 200, 0.6)
    assert pace.prompt_tokens(1) == 0
    pace.learn(1, 0, ALONE)
    assert pace.prompt_tokens(1) > 0
    assert pace.prompt_tokens(2) == 0, "two of them may take longer"


@pytest.mark.parametrize("least", [8, 32, 100])
def test_answers_keep_their_pace_and_prompts_get_all_of_the_rest(least: int) -> None:
    found = steps(learnt(least=least), 200)
    assert 0.9 * SLOWDOWN * ALONE <= mean(found) <= 1.02 * SLOWDOWN * ALONE
    assert all(tokens == 0 or tokens >= least for tokens, _ in found)


def test_where_the_device_is_shared_answers_keep_their_pace_at_the_cost_of_prompts() -> None:
    found = steps(learnt(), 200, device=lambda decodes, tokens: 1.8 * processor(decodes, tokens))
    assert mean(found) <= 1.1 * SLOWDOWN * ALONE
    assert sum(tokens for tokens, _ in found) >= 200 * 0.5 * (SLOWDOWN - 1.8) * ALONE / (1.8 * A_TOKEN)


def test_where_answers_cannot_keep_their_pace_a_prompt_still_gets_on() -> None:
    found = steps(learnt(), 90, device=lambda decodes, tokens: 4.0 * processor(decodes, tokens))
    assert sum(tokens for tokens, _ in found) >= 90 // 9 * 32


def test_a_device_that_has_slowed_down_for_good_is_believed_in_the_end() -> None:
    pace = learnt()
    steps(pace, 3000, device=lambda decodes, tokens: 3.0 * processor(decodes, tokens))
    found = steps(pace, 100, device=lambda decodes, tokens: 3.0 * processor(decodes, tokens))
    assert mean(found) >= 0.8 * SLOWDOWN * 3.0 * ALONE


def test_a_step_that_took_very_long_once_is_paid_back_in_a_few() -> None:
    pace = learnt()
    steps(pace, 20)
    pace.learn(1, 30, 60.0)
    assert sum(tokens for tokens, _ in steps(pace, 60)) >= 60 * 10


def test_a_device_with_a_thousand_cores_gets_hundreds_of_tokens_a_step() -> None:
    def device(decodes: int, tokens: int) -> float:
        return 0.010 + 30e-6 * tokens

    pace = StepPace(SLOWDOWN)
    pace.learn(0, 512, device(0, 512))
    pace.learn(64, 0, device(64, 0))
    found = steps(pace, 50, decodes=64, device=device)
    assert min(tokens for tokens, _ in found[10:]) >= 400


def test_chunks_are_multiples_of_what_layers_compute_at_once() -> None:
    found = steps(learnt(multiple=64), 100)
    assert {tokens % 64 for tokens, _ in found} == {0}
    assert mean(found) <= 1.02 * SLOWDOWN * ALONE


def talk(engine: Simulation, prompts: list[int]) -> tuple[float, list[int]]:
    """An answer runs alone for a while, then prompts of so many tokens come: its seconds a token until all of them have
    begun, and the steps after which each had."""
    talking = engine.submit(order(text(8, 99), max_tokens=2000))
    for _ in range(20):
        engine.step()
    came, said = engine.now, len(engine.outcomes[talking].tokens[0])
    asked = [engine.submit(order(text(length, seed), max_tokens=1)) for seed, length in enumerate(prompts)]
    begun = [0] * len(asked)
    for at in range(1, 2000):
        engine.step()
        for which, id in enumerate(asked):
            begun[which] = begun[which] or (at if engine.outcomes[id].over else 0)
        if all(begun):
            break
    return (engine.now - came) / (len(engine.outcomes[talking].tokens[0]) - said), begun


def engine_for(slowdown: float, **more: int) -> Simulation:
    return simulation(
        blocks=400,
        block_size=16,
        step_tokens=512,
        prefix_cache=False,
        decode_slowdown=slowdown,
        takes=processor,
        **more,
    )


def test_a_running_answer_keeps_its_pace_while_prompts_come_and_the_first_of_them_begins_first() -> None:
    free, _ = talk(engine_for(0.0), [240] * 8)
    kept, begun = talk(engine_for(SLOWDOWN), [240] * 8)
    assert free > 5 * ALONE
    assert kept <= 1.05 * SLOWDOWN * ALONE
    assert begun[0] <= 2 * begun[-1] / 8 + 1
    assert begun == sorted(begun)


def test_a_short_prompt_does_not_wait_for_a_long_one_though_steps_are_small() -> None:
    _, (long, short) = talk(engine_for(SLOWDOWN), [2000, 60])
    assert short <= 8 < long


def test_a_picture_that_may_not_be_cut_is_computed_at_once_and_paid_back() -> None:
    engine = engine_for(SLOWDOWN, keep_media_whole=True)
    talking = engine.submit(order(text(8, 99), max_tokens=1000))
    for _ in range(20):
        engine.step()
    came, said = engine.now, len(engine.outcomes[talking].tokens[0])
    id = engine.submit(order(text(220, 1), [Picture(1, 4, 200)], max_tokens=1))
    engine.land_all(id)
    counts = []
    for _ in range(60):
        step = engine.step()
        counts += [count for sequence, count in step.work if sequence.id == id]
    assert any(count >= 200 for count in counts)
    assert engine.outcomes[id].over
    pace = (engine.now - came) / (len(engine.outcomes[talking].tokens[0]) - said)
    assert pace <= 1.05 * SLOWDOWN * ALONE


def test_layers_with_states_are_cut_at_their_multiples_while_answers_run() -> None:
    engine = engine_for(SLOWDOWN, state_slots=16, state_chunk=64)
    engine.submit(order(text(8, 99), max_tokens=1000))
    for _ in range(20):
        engine.step()
    asked = {engine.submit(order(text(200 + at, at), max_tokens=1)): 0 for at in range(4)}
    while not all(engine.outcomes[id].over for id in asked):
        for sequence, count in engine.step().work:
            if sequence.id in asked:
                assert asked[sequence.id] % 64 == 0, "it goes on from a multiple"
                asked[sequence.id] += count
    engine.drain()
