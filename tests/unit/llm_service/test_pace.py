"""How long items take at an encoder, and when one that was slow is tried again, with a clock that the test sets."""

from __future__ import annotations

from math import inf

import pytest

from llm_service.encoders.pace import Pace
from tests.unit.llm_service.test_breaker import Clock


def test_what_an_item_takes_is_expected_by_those_of_late_and_more_of_a_larger_one() -> None:
    pace = Pace(10.0)
    assert pace.expected(1000) == 0.0
    pace.on_computed(2.0, 100, 0.0)
    assert [pace.expected(patches) for patches in (0, 50, 100, 300)] == [2.0, 2.0, 2.0, 6.0]
    for _ in range(50):
        pace.on_computed(1.0, 200, 0.0)
    assert pace.expected(400) == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize(("elsewhere", "in_time"), [(0.0, 1.25), (0.3, 1.25), (1.0, 4.0), (5.0, 10.0), (inf, 10.0)])
def test_an_encoder_is_slow_until_an_item_takes_hardly_longer_there_than_elsewhere(
    elsewhere: float, in_time: float
) -> None:
    clock = Clock()
    pace = Pace(10.0, clock)
    assert not pace.on_computed(0.1, 100, elsewhere), "it was never slow"
    assert pace.on_overdue()
    assert not pace.on_overdue(), "that is no news"
    assert pace.is_slow_since(clock.now - 1)
    assert not pace.is_slow_since(clock.now + 1)
    assert not pace.on_computed(in_time + 0.1, 100, elsewhere)
    assert pace.slow
    assert pace.on_computed(in_time - 0.1, 100, elsewhere)
    assert not pace.slow


def test_a_slow_encoder_is_tried_now_and_then_ever_more_rarely() -> None:
    clock = Clock()
    pace = Pace(10.0, clock)
    pace.on_sending()
    pace.on_overdue()
    for pause in (10.0, 20.0, 40.0, 80.0, 80.0):
        clock.now += pause - 1
        assert not pace.may_be_tried
        clock.now += 1
        assert pace.may_be_tried
        pace.on_sending()
        assert not pace.may_be_tried
        pace.on_overdue()
    pace.on_computed(1.0, 100, 0.0)
    assert not pace.may_be_tried, "it is no longer slow"
    pace.on_overdue()
    clock.now += 10.0
    assert pace.may_be_tried, "pauses begin anew"
