"""Stages of a request: how long, and when."""

from __future__ import annotations

import math

import pytest

from common.media.convert import read_stages, write_stages
from common.telemetry.stages import Stage, add, seconds_of
from twinlens.v1 import media_pb2


def test_a_stage_that_goes_on_later_has_a_pause() -> None:
    stages = {"decode": Stage.between(10.0, 12.0)}
    add(stages, "decode", Stage.between(15.0, 16.0))
    add(stages, "vit", Stage.between(11.0, 13.0))
    assert stages == {"decode": Stage(3.0, 10.0, 16.0), "vit": Stage(2.0, 11.0, 13.0)}
    assert seconds_of(stages) == {"decode": 3.0, "vit": 2.0}


def test_what_nobody_said_when_does_not_move_the_rest() -> None:
    known, unknown = Stage.between(1.0, 2.0), Stage(5.0)
    assert known.with_more(unknown) == unknown.with_more(known) == Stage(6.0, 1.0, 2.0)
    assert unknown.with_more(unknown).since(1.0) == Stage(10.0)


def test_moments_cross_to_another_clock() -> None:
    """Each side counts from a moment that both have: the call."""
    theirs = {"vit": Stage.between(107.0, 109.5).since(105.0), "hash": Stage(0.25)}
    assert read_stages(write_stages(theirs), called=40.0) == {"vit": Stage(2.5, 42.0, 44.5), "hash": Stage(0.25)}


def test_work_that_an_earlier_call_began_lies_before_this_one() -> None:
    assert write_stages({"vit": Stage.between(3.0, 6.0).since(5.0)})[0].start_seconds == -2.0


def test_a_moment_that_is_no_number_is_not_known() -> None:
    for value in (math.nan, math.inf):
        given = media_pb2.StageTiming(stage="vit", seconds=1.0, start_seconds=value, end_seconds=3.0)
        assert read_stages([given], called=1.0) == {"vit": Stage(1.0, None, 4.0)}


@pytest.mark.parametrize("seconds", [math.nan, math.inf])
def test_a_stage_whose_time_is_no_number_is_left_out(seconds: float) -> None:
    given = [media_pb2.StageTiming(stage="vit", seconds=seconds), media_pb2.StageTiming(stage="hash", seconds=1.0)]
    assert read_stages(given, called=1.0) == {"hash": Stage(1.0)}
