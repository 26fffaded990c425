"""Sizes and frames where the reference has nothing to say; where it has, the parity tests compare."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.media.item import Grid, Options, Pixels
from encoder_service.families import qwen2_vl, qwen3_vl
from encoder_service.families.qwen_processors import ImageProcessor, VideoProcessor, VideoRule
from encoder_service.families.resizing import bounds, resize_clip, resize_picture
from encoder_service.item import Inspection
from tests.unit.encoder_service.engines import PIXELS, VIDEOS

NONE = Options()
RULES = pytest.mark.parametrize("rule", [qwen2_vl.VIDEO_RULE, qwen3_vl.VIDEO_RULE], ids=["qwen2_vl", "qwen3_vl"])


def video(rule: VideoRule) -> VideoProcessor:
    return replace(VIDEOS, rule=rule)


def test_a_picture_s_plan():
    wide = replace(PIXELS, min_pixels=1, max_pixels=1 << 30)
    plan = ImageProcessor(wide).plan(Inspection(640, 480), NONE)
    assert (plan.grid, plan.tokens, plan.resized) == (Grid(1, 34, 46), 17 * 23, (476, 644))
    assert (plan.frames, plan.pixel_bytes, plan.timestamps) == ((0,), 640 * 480 * 3, ())


@RULES
@pytest.mark.parametrize("frames", [1, 2, 3])
def test_the_shortest_videos_fill_a_frame_group(rule, frames):
    plan = video(rule).plan(Inspection(64, 48, frames, 10.0), NONE)
    assert len(plan.frames) == 2 * plan.grid.t
    assert max(plan.frames) < frames
    assert len(plan.timestamps) == plan.grid.t
    assert plan.seconds_per_grid > 0


@RULES
@example(frames=263, rate=1.0, fps=1.0, most=254, width=64, height=64)
@given(
    frames=st.integers(1, 5000),
    rate=st.floats(0.5, 240),
    fps=st.floats(0.01, 60),
    most=st.integers(1, 768),
    width=st.integers(4, 2000),
    height=st.integers(4, 2000),
)
def test_every_video_has_a_plan_within_its_bounds(rule, frames, rate, fps, most, width, height):
    plan = video(rule).plan(Inspection(width, height, frames, rate), Options(fps=fps, max_frames=most))
    kept = len(plan.frames)
    assert kept == 2 * plan.grid.t
    assert kept <= max(2, most + most % 2)
    assert all(0 <= frame < frames for frame in plan.frames)
    assert list(plan.frames) == sorted(plan.frames)
    assert plan.resized == (plan.grid.h * 14, plan.grid.w * 14)
    assert plan.grid.h % 2 == plan.grid.w % 2 == 0
    assert plan.tokens * 4 == plan.grid.patches


@given(st.integers(1, 16384), st.integers(1, 16384), st.integers(1, 2000), st.integers(0, 4000))
def test_every_picture_has_sides_of_whole_squares(height, width, least, more):
    factor = 28
    low, high = least * factor * factor, (least + more) * factor * factor
    tall, wide = resize_picture(height, width, factor, low, high)
    assert tall % factor == wide % factor == 0
    assert min(tall, wide) >= factor


def test_small_frames_are_brought_to_one_square_first():
    assert resize_clip(4, 10, 20, 2, 28, 4 * 28 * 28, 1 << 30) == (28, 56)


def test_a_caller_s_bound_wins_over_the_model_s():
    assert bounds(1000, 2000, NONE) == (1000, 2000)
    assert bounds(1000, 2000, Options(min_pixels=5000)) == (5000, 5000)
    assert bounds(1000, 2000, Options(max_pixels=10)) == (10, 10)


@given(
    model=st.tuples(st.integers(1, 99), st.integers(1, 99)).map(sorted),
    least=st.none() | st.integers(1, 99),
    most=st.integers(1, 99),
)
def test_a_bound_that_only_lowers_makes_no_picture_larger(model, least, most):
    plain = bounds(*model, Options(min_pixels=least))
    lowered = bounds(*model, Options(min_pixels=least, max_pixels=most, clamp_max_pixels=True))
    assert lowered[0] <= lowered[1] <= min(plain[1], most)
    assert lowered[0] <= plain[0]
    assert bounds(*model, Options(min_pixels=least, clamp_max_pixels=True)) == plain


def test_a_caller_s_bound_on_a_video_is_for_all_frames_together():
    seen = Inspection(560, 560, 80, 20.0)
    plan = video(qwen2_vl.VIDEO_RULE).plan(seen, Options(max_pixels=8 * 56 * 56))
    assert len(plan.frames) * plan.resized[0] * plan.resized[1] <= 8 * 56 * 56


@RULES
@pytest.mark.parametrize("cap", [False, True])
@pytest.mark.parametrize("side", [112, 1120])
def test_a_caller_s_greatest_area_holds_where_the_model_s_least_one_is_larger(rule, cap, side):
    square = 28 * 28
    pixels = replace(PIXELS, min_pixels=128 * square, max_pixels=768 * square)
    settings = replace(video(rule), pixels=pixels, cap_pixels_per_frame=cap, max_video_tokens=768)
    plan = settings.plan(Inspection(side, side, 80, 10.0), Options(max_pixels=16 * 25 * square))
    assert len(plan.frames) * plan.resized[0] * plan.resized[1] <= 16 * 25 * square


@RULES
def test_a_caller_s_least_area_moves_the_model_s_greatest_one_no_further_than_it_must(rule):
    least = 16 * 20 * 28 * 28
    plan = video(rule).plan(Inspection(2000, 2000, 80, 10.0), Options(min_pixels=least))
    assert 0.75 * least <= len(plan.frames) * plan.resized[0] * plan.resized[1] <= least


def test_frames_without_times_are_as_far_apart_as_the_options_say():
    given_frames = Pixels(b"", 4, 56, 56)
    plan = VIDEOS.plan_pixels(given_frames, Options(fps=4.0))
    assert (plan.timestamps, plan.seconds_per_grid) == ((0.125, 0.625), 0.5)
    timed = replace(given_frames, timestamps=(0.0, 2.0, 4.0, 6.0))
    plan = VIDEOS.plan_pixels(timed, NONE)
    assert (plan.timestamps, plan.seconds_per_grid) == ((1.0, 5.0), 4.0)
