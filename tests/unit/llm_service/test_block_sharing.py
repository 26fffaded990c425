"""What prompts share: blocks of the same text, pictures and tenant, and nothing else."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from llm_service.engine import block_identity
from llm_service.engine.block_identity import BlockIdentities
from llm_service.engine.messages import Add, ItemRows
from llm_service.engine.prompt import Prompt
from llm_service.request import MediaRun, SamplingParams
from tests.unit.llm_service.hashed import Order, Picture
from tests.unit.llm_service.simulated import order, run_until_over, simulation, text

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


@pytest.mark.parametrize("more", [{}, {"state_slots": 12, "state_chunk": 8}, {"early_tokens": 0}], ids=str)
@pytest.mark.parametrize("overlap", [False, True])
def test_scores_that_nobody_takes_are_not_piled_up_and_keep_nobody_waiting(overlap: bool, more: dict[str, int]) -> None:
    engine = simulation(step_tokens=8, blocks=34, max_running=2, overlap=overlap, **more)
    slow = engine.submit(order(text(100), prompt_logprobs=0))
    engine.slow.add(slow)
    while engine.step() is not None:
        pass
    assert 8 <= len(engine.outcomes[slow].scored) <= 16
    for seed in range(3):  # they have no room but its own
        run_until_over(engine, engine.submit(order(text(90, seed), max_tokens=40)))
    assert engine.scheduler.counters.preemptions > 0
    engine.take_prompt_logprobs(slow)
    while engine.step() is not None:
        pass
    assert 16 < len(engine.outcomes[slow].scored) <= 32
    engine.drain()
    assert len(engine.outcomes[slow].scored) == 99


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


def test_identities_that_come_with_a_prompt_are_not_worked_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = simulation(), order(text(25), [Picture(1, 4, 12)], n=2, max_tokens=2)
    first = engine.submit(asked)
    assert first % 2, "its identities come with it"
    monkeypatch.setattr(block_identity, "block_identity", None)
    engine.land_all(first)
    run_until_over(engine, first)
    monkeypatch.undo()
    again = engine.submit(asked)
    engine.land_all(again)
    run_until_over(engine, again)
    assert engine.outcomes[again].cached == 24, "an engine names them alike"


def test_blocks_of_a_mark_that_is_elsewhere_than_in_a_text_are_others() -> None:
    """A mark before a picture whose rows are in the next block; the mark counts on, or stands beside the canvas."""
    tokens = array("i", range(12))
    count_on = np.tile(np.arange(12, dtype=np.int32), (3, 1))
    beside = count_on.copy()
    beside[1:, 3] = 1
    fields: dict[str, Any] = {"mrope_delta": 0, "salt": "", "priority": 0, "deadline": None}
    fields["sampling"] = SamplingParams(max_tokens=4)

    def names(places: np.ndarray, items: list[ItemRows]) -> list[bytes]:
        add = Add(id=1, token_ids=tokens.tobytes(), positions=places.tobytes(), items=items, **fields)
        prompt = Prompt.of(add)
        return BlockIdentities(prompt.root, prompt.keyed_runs).first(3, tokens, 4)

    shown = [ItemRows(key=b"picture", offset=0, runs=(MediaRun(4, 0, 2),), landed=2)]
    text, plain, marked = names(count_on, []), names(count_on, shown), names(beside, shown)
    assert text[0] == plain[0] != marked[0]
    assert len({text[1], plain[1], marked[1]}) == 3
    assert marked == names(beside, shown)


@pytest.mark.parametrize("speculative_tokens", [0, 4])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("said", range(1, 10))
def test_the_next_turn_begins_behind_all_that_is_computed_of_an_answer(
    said: int, overlap: bool, speculative_tokens: int
) -> None:
    engine = simulation(block_size=4, overlap=overlap, speculative_tokens=speculative_tokens)
    first = order(text(21), max_tokens=said)
    id = engine.submit(first)
    run_until_over(engine, id)
    history = [*first.prompt, *engine.outcomes[id].tokens[0]]
    next_turn = engine.submit(order([*history, *text(20, 1)]))
    run_until_over(engine, next_turn)
    assert engine.outcomes[next_turn].cached == (len(history) - 1) // 4 * 4
    engine.drain()
