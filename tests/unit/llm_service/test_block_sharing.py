"""What prompts share: blocks of the same text, pictures and tenant, and nothing else."""

from __future__ import annotations

import pytest

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
