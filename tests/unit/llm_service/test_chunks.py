"""Where chunks of a prompt end: before rows that have not landed, and outside media that are kept whole."""

from __future__ import annotations

from typing import Any

import pytest

from llm_service.families.chunk_rule import ChunkRule
from llm_service.families.sight import SpanRule
from tests.unit.llm_service.hashed import Picture
from tests.unit.llm_service.simulated import order, run_until_over, simulation, text

_WHOLE = ChunkRule(SpanRule.WHOLE_PROMPTS)


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


def test_an_item_that_must_be_whole_is_never_cut_and_refused_where_no_step_holds_it() -> None:
    engine = simulation(max_running=2, step_tokens=10, chunk_rule=ChunkRule(SpanRule.EVERYWHERE))
    fits = engine.submit(order(text(30), [Picture(1, 4, 9)]))
    engine.land_all(fits)
    counts = []
    while not engine.outcomes[fits].over:
        step = engine.step()
        assert step is not None
        counts.append(step.plan.tokens)
    assert counts[:2] == [4, 10]
    engine.submit(order(text(30), [Picture(2, 4, 10)]))
    (failure,) = engine.scheduler.take_notices().failed
    assert (failure.reason, failure.field) == ("EMBEDDINGS_TOO_LARGE", "media")
    assert engine.step() is None


@pytest.mark.parametrize(("spans", "computed"), [(SpanRule.EVERYWHERE, 2), (SpanRule.BEYOND_WINDOWS, 10)])
def test_what_the_cache_has_of_a_run_is_computed_again_where_its_rows_see_its_first(
    spans: SpanRule, computed: int
) -> None:
    engine = simulation(max_running=2, step_tokens=16, chunk_rule=ChunkRule(spans))
    counts = []
    for _ in range(2):
        id = engine.submit(order(text(14), [Picture(1, 4, 9)]))
        engine.land_all(id)
        step = engine.step()
        assert step is not None
        counts.append(step.plan.tokens)
        run_until_over(engine, id)
    assert counts == [14, computed]
    engine.check_over()


@pytest.mark.parametrize(
    ("more", "computed"),
    [({}, 18 - 4), ({"state_slots": 8, "state_chunk": 8}, 18)],
    ids=["blocks end in the run before", "no state is kept in front of the run"],
)
def test_in_front_of_a_run_a_prompt_begins_where_it_may(more: dict[str, int], computed: int) -> None:
    rule = ChunkRule(SpanRule.BEYOND_WINDOWS)
    engine = simulation(max_running=2, step_tokens=32, chunk_rule=rule, **more)
    for tokens in (18, computed):
        id = engine.submit(order(text(18), [Picture(1, 4, 5), Picture(2, 9, 8)]))
        engine.land_all(id)
        step = engine.step()
        assert step is not None
        assert step.plan.tokens == tokens
        run_until_over(engine, id)
    engine.check_over()


def test_a_prompt_that_is_seen_whole_waits_for_its_last_row_and_is_computed_at_once() -> None:
    engine = simulation(max_running=2, step_tokens=31, chunk_rule=_WHOLE)
    running = engine.submit(order(text(5, 1), max_tokens=12))
    id = engine.submit(order(text(30), [Picture(1, 4, 6)]))
    counts = []
    for landed in (0, 5, 6, 6):
        engine.land(id, 0, landed)
        step = engine.step()
        counts.append(step.plan.tokens if step else 0)
    assert counts == [5, 1, 31, 2]
    run_until_over(engine, running)
    engine.check_over()


def test_a_prompt_that_is_seen_whole_is_refused_where_no_step_holds_it() -> None:
    engine = simulation(max_running=2, step_tokens=31, chunk_rule=_WHOLE)
    engine.submit(order(text(31)))
    (failure,) = engine.scheduler.take_notices().failed
    assert (failure.reason, failure.field) == ("PROMPT_TOO_LONG", "input")
    assert "31 tokens > 30 maximum" in failure.message
    assert engine.step() is None


def test_only_those_with_the_whole_prompt_in_common_share_what_was_computed_of_it() -> None:
    """A question about the same picture is another prompt; three choices have one."""
    engine = simulation(step_tokens=64, chunk_rule=_WHOLE)
    asked = order(text(18), [Picture(1, 0, 8)], n=3, max_tokens=6, temperature=1.0, seed=3)
    other = order((*asked.prompt[:-1], asked.prompt[-1] % 20 + 1), asked.pictures)
    cached = []
    for each in (asked, asked, other, order(text(40, 5)), order(text(40, 5)[:24])):
        id = engine.submit(each)
        engine.land_all(id)
        run_until_over(engine, id)
        cached.append(engine.outcomes[id].cached)
    assert cached == [0, 16, 0, 0, 0]
    assert engine.computed == (18 + 2 + 2 + 3 * 5) + (3 * 2 + 3 * 5) + (18 + 3) + (40 + 3) + (24 + 3)
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


@pytest.mark.parametrize(
    ("rule", "more"),
    [
        ({"keep_media_whole": True}, {}),
        ({"keep_media_whole": True}, {"proposes": True}),
        ({"keep_media_whole": True}, {"state_slots": 32, "state_chunk": 4}),
        ({"chunk_rule": ChunkRule(SpanRule.EVERYWHERE)}, {}),
        ({"chunk_rule": _WHOLE}, {}),
    ],
    ids=["kept whole", "a draft model", "states", "rows see each other", "the prompt is seen whole"],
)
def test_a_picture_that_needs_nearly_the_whole_step_is_not_kept_out_by_drafts(
    rule: dict[str, Any], more: dict[str, Any]
) -> None:
    """Those that decode have drafts in every step, which would leave no room for it as long as they are right."""
    engine = simulation(blocks=256, max_running=4, step_tokens=16, speculative_tokens=8, draft_rows=14, **rule, **more)
    running = [engine.submit(order(text(4, seed), max_tokens=200)) for seed in range(3)]
    for _ in range(4):
        engine.step()
    id = engine.submit(order(text(13), [Picture(1, 0, 13)], max_tokens=1))
    engine.land_all(id)
    run_until_over(engine, id, 8)
    step = engine.step()
    assert step is not None
    assert step.plan.tokens > 3, "drafts are back"
    assert not any(engine.outcomes[each].over for each in running)


@pytest.mark.parametrize(
    ("step_tokens", "chunks"), [(16, [4, 0, 8]), (8, [4, 2, 6])], ids=["that fits a step", "longer than a step"]
)
def test_a_chunk_ends_before_a_picture_of_which_rows_are_missing(step_tokens: int, chunks: list[int]) -> None:
    engine = simulation(max_running=4, step_tokens=step_tokens)
    id = engine.submit(order(text(12), [Picture(1, 4, 6)]))
    counts = []
    for landed in (0, 2, 6):
        engine.land(id, 0, landed)
        step = engine.step()
        counts.append(step.plan.tokens if step else 0)
    assert counts == chunks
    assert len(engine.outcomes[id].tokens[0]) == 1


def test_a_prompt_that_waits_for_rows_goes_on_where_enough_of_it_can_be_computed() -> None:
    engine = simulation(early_tokens=4)
    id = engine.submit(order(text(16), [Picture(1, 3, 8, (1, 3, 4))]))
    counts = []
    for landed in (0, 1, 4, 5, 8):
        engine.land(id, 0, landed)
        step = engine.step()
        counts.append(step.plan.tokens if step else 0)
    assert counts == [0, 5, 4, 0, 7]
    assert len(engine.outcomes[id].tokens[0]) == 1


@pytest.mark.parametrize("early", [0, 100])
def test_a_prompt_may_wait_for_all_of_its_rows(early: int) -> None:
    engine = simulation(early_tokens=early)
    id = engine.submit(order(text(20), [Picture(1, 10, 4)]))
    assert engine.step() is None
    engine.land(id, 0, 3)
    assert engine.step() is None
    engine.land(id, 0, 4)
    step = engine.step()
    assert step is not None
    assert step.plan.tokens == 20


def test_what_is_left_of_a_prompt_whose_rows_are_here_may_be_short() -> None:
    engine = simulation(step_tokens=8, early_tokens=6)
    id = engine.submit(order(text(9), [Picture(1, 2, 4)]))
    engine.land_all(id)
    steps = [engine.step(), engine.step()]
    assert [step.plan.tokens for step in steps if step] == [8, 1]


def test_rows_that_wait_for_others_do_not_make_a_short_text_worth_a_step() -> None:
    engine = simulation(early_tokens=6)
    id = engine.submit(order(text(14), [Picture(1, 4, 6)]))
    engine.land(id, 0, 5)
    assert engine.step() is None
    engine.land_all(id)
    step = engine.step()
    assert step is not None
    assert step.plan.tokens == 14


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
    assert counts == [6, 0, 8]


def test_a_step_with_fewer_tokens_than_sequences_that_may_run_has_room_for_any_prompt_that_may_be_cut() -> None:
    engine = simulation(max_running=8, step_tokens=3)
    id = engine.submit(order(text(30), [Picture(1, 4, 9)]))
    engine.land_all(id)
    run_until_over(engine, id)
    engine.check_over()
