"""Positions in time, height and width. The parity suite compares them with transformers; here are the rules."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import Qwen2_5_VLConfig

from common.errors import DataLoss
from common.media.item import MAX_POSITION, Grid, Header, Modality, PromptPart
from llm_service.families.family import InPrompt, Rows
from llm_service.prompt.mrope import MediaLayout, positions
from llm_service.request import MediaRun, Span


def layout_of(tokens_per_second: float = 0.0, *, timed_frames: bool = False) -> MediaLayout:
    """Of a family that has videos like this."""
    modalities = {Modality.IMAGE: InPrompt("image"), Modality.VIDEO: InPrompt("video", timed_frames=timed_frames)}
    return MediaLayout(2, modalities, tokens_per_second)


PLAIN = layout_of()


def span(kind: str, grid: tuple[int, int, int], *starts: int, seconds: float = 0.0) -> Span:
    t, h, w = grid
    tokens = t * h * w // 4
    count = tokens // len(starts)
    header = Header(b"", Modality(kind), Grid(*grid), tokens, seconds_per_grid=seconds)
    return Span(0, header, tuple(MediaRun(start, n * count, count) for n, start in enumerate(starts)))


def test_text_counts_on_in_all_three() -> None:
    where, mrope_delta = positions(range(5), [], PLAIN)
    assert where.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert mrope_delta == 0


def test_nothing_has_no_positions() -> None:
    where, mrope_delta = positions(range(0), [], PLAIN)
    assert where.shape == (3, 0)
    assert mrope_delta == 0


def test_a_picture_spreads_over_rows_and_columns_and_text_goes_on_past_the_longer_side() -> None:
    where, mrope_delta = positions(range(10), [span("image", (1, 4, 6), 2)], PLAIN)
    assert where.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert mrope_delta == 7 - 10


@pytest.mark.parametrize(
    ("layout", "times"),
    [(PLAIN, [0, 1, 2]), (layout_of(2.0, timed_frames=True), [0, 3, 6])],
)
def test_a_videos_time_counts_frame_groups_or_seconds(layout: MediaLayout, times: list[int]) -> None:
    where, _ = positions(range(12), [span("video", (3, 4, 4), 0, seconds=1.5)], layout)
    assert where[0].tolist() == [time for time in times for _ in range(4)]
    assert where[1].tolist() == [0, 0, 1, 1] * 3


def test_frames_that_stand_apart_are_each_at_one_time_and_later_than_the_text_before() -> None:
    where, mrope_delta = positions(range(10), [span("video", (2, 4, 4), 1, 6)], PLAIN)
    assert where[0].tolist() == [0, 1, 1, 1, 1, 3, 4, 4, 4, 4]
    assert where[2].tolist() == [0, 1, 2, 1, 2, 3, 4, 5, 4, 5]
    assert mrope_delta == 6 - 10


def test_spans_are_found_in_any_order() -> None:
    first, second = span("image", (1, 2, 2), 1), span("image", (1, 4, 4), 3)
    one, _ = positions(range(9), [first, second], PLAIN)
    other, _ = positions(range(9), [second, first], PLAIN)
    assert np.array_equal(one, other)


def test_what_a_configuration_leaves_out_is_as_transformers_has_it() -> None:
    theirs = Qwen2_5_VLConfig().vision_config
    layout = MediaLayout.of({"model_type": "qwen2_5_vl", "vision_config": {}})
    assert (layout.merge, layout.tokens_per_second) == (theirs.spatial_merge_size, theirs.tokens_per_second)


@pytest.mark.parametrize(
    ("kind", "runs", "rate"),
    [("qwen2_vl", [6], 0.0), ("qwen2_5_vl", [6], 2.0), ("qwen3_vl", [2, 2, 2], 0.0), ("qwen3_vl_moe", [2, 2, 2], 0.0)],
)
def test_a_familys_layout_is_read_from_its_configuration(kind: str, runs: list[int], rate: float) -> None:
    config = {"model_type": kind, "vision_config": {"spatial_merge_size": 3, "tokens_per_second": 2}}
    layout = MediaLayout.of(config)
    video = layout.modalities[Modality.VIDEO]
    header = Header(b"", Modality.VIDEO, Grid(3, 3, 6), 6, timestamps=(0.25, 1.25, 2.25))
    assert layout.merge == 3
    assert [part.count for part in video.expand(header) if isinstance(part, Rows)] == runs
    assert layout.tokens_per_second * video.timed_frames == rate
    assert layout.modalities[Modality.IMAGE] == InPrompt("image_token_id")


def test_rows_that_are_placed_from_the_origin_are_so_wherever_they_stand() -> None:
    """Two items between words, each of a mark, two rows and a mark; the last axis has the item's number."""
    run = np.array([[0, 1], [5, 5], [0, 0]], "<i4").tobytes()
    parts = (PromptPart("", 1, 5), PromptPart("", 2, 5, run, 2, from_origin=True), PromptPart("", 1, 5))
    header = Header(b"", Modality.IMAGE, Grid(1, 1, 4), 4, replacement=parts)
    layout = MediaLayout(1, {}, 0.0, layout_from_encoder=True)
    spans = [
        Span(item, header, (MediaRun(at, 0, 1), MediaRun(at + 1, 1, 2), MediaRun(at + 3, 3, 1)))
        for item, at in enumerate((1, 6))
    ]
    where, mrope_delta = positions(range(11), spans, layout)
    assert where.tolist() == [
        [0, 1, 0, 1, 4, 5, 6, 0, 1, 9, 10],
        [0, 1, 5, 5, 4, 5, 6, 5, 5, 9, 10],
        [0, 1, 0, 0, 4, 5, 6, 1, 1, 9, 10],
    ]
    assert mrope_delta == 0


def test_places_that_encoders_tell_may_go_back_and_the_answer_goes_on_behind_the_furthest() -> None:
    """A mark at the place of the token before it, a run at height 7, and a text behind them that goes on from 3."""
    run = np.array([[-1, 0, 1], [-1, 0, 7], [-1, 0, 1]], "<i4").tobytes()
    parts = (PromptPart("(", 2, 5, run, 2), PromptPart(")", advance=-1))
    header = Header(b"", Modality.VIDEO, Grid(1, 1, 2), 2, replacement=parts)
    layout = MediaLayout(1, {}, 0.0, layout_from_encoder=True)
    runs = (MediaRun(3, 0, 2), MediaRun(6, 2, 0))
    where, mrope_delta = positions(range(9), [Span(0, header, runs)], layout)
    assert where.tolist() == [
        [0, 1, 1, 2, 3, 4, 4, 5, 6],
        [0, 1, 1, 2, 9, 4, 4, 5, 6],
        [0, 1, 1, 2, 3, 4, 4, 5, 6],
    ]
    assert mrope_delta == 10 - 9


def test_marks_of_an_item_are_where_an_encoder_says_and_pinned_tokens_behind_it_where_its_last_is() -> None:
    """A mark before the canvas, a row, a mark at its far corner, and two line ends: the canvas begins at 0."""
    first, last = (
        np.array([list(time), list(side), list(side)], "<i4").tobytes()
        for time, side in (((0, 0), (-1, 0)), ((0,), (3,)))
    )
    parts = (PromptPart("(", 1, 5, first, 0), PromptPart(")", positions=last, advance=4))
    header = Header(b"", Modality.IMAGE, Grid(1, 1, 1), 1, replacement=parts)
    layout, runs = MediaLayout(1, {}, 0.0, layout_from_encoder=True, pinned={9}), (MediaRun(1, 0, 1), MediaRun(3, 1, 0))
    where, mrope_delta = positions([3, 5, 4, 9, 9, 1, 9], [Span(0, header, runs)], layout)
    assert where.tolist() == [[0, 0, 0, 0, 0, 4, 5], *[[0, 0, 3, 0, 0, 4, 5]] * 2]
    assert mrope_delta == 6 - 7


def test_an_encoder_that_places_more_tokens_than_there_are_is_not_believed() -> None:
    parts = (PromptPart("((", 1, 5, np.zeros((3, 3), "<i4").tobytes(), 1),)
    span = Span(0, Header(b"", Modality.IMAGE, Grid(1, 1, 1), 1, replacement=parts), (MediaRun(1, 0, 1),))
    with pytest.raises(DataLoss):
        positions(range(3), [span], MediaLayout(1, {}, 0.0, layout_from_encoder=True))


@pytest.mark.parametrize(
    "parts",
    [
        (PromptPart("", 1, 5, np.full((3, 1), -5, "<i4").tobytes(), from_origin=True),),
        (PromptPart("", 1, 5, bytes(12), advance=-9),),
        (PromptPart("", 1, 5, bytes(12), advance=MAX_POSITION), PromptPart("", advance=MAX_POSITION)),
    ],
    ids=["before all", "a text before all", "twice as far as may be"],
)
def test_an_encoder_that_places_tokens_where_no_prompt_has_any_is_not_believed(parts: tuple[PromptPart, ...]) -> None:
    header = Header(b"", Modality.IMAGE, Grid(1, 1, 1), 1, replacement=parts)
    runs = (MediaRun(0, 0, 1), MediaRun(2, 1, 0))[: len(parts)]
    with pytest.raises(DataLoss):
        positions(range(4), [Span(0, header, runs)], MediaLayout(1, {}, 0.0, layout_from_encoder=True))
