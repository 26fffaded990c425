"""What is expected of a worker, from what it did."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder_service.engine.batch_history import Pace


def test_nothing_is_expected_before_the_first_batch():
    assert Pace().seconds(100) is None


def test_the_first_batch_is_believed():
    pace = Pace()
    pace.learn(1000, 2.0)
    assert pace.seconds(500) == pytest.approx(1.0)


def test_what_was_long_ago_is_forgotten():
    pace = Pace()
    for _ in range(5):
        pace.learn(100, 50.0)
    for _ in range(40):
        pace.learn(100, 1.0)
    assert pace.seconds(100) == pytest.approx(1.0, rel=0.02)


@given(st.lists(st.tuples(st.integers(1, 100_000), st.floats(0.001, 100)), min_size=1))
def test_the_pace_lies_between_the_fastest_and_the_slowest_batch(batches):
    pace = Pace()
    for patches, seconds in batches:
        pace.learn(patches, seconds)
    paces = [seconds / patches for patches, seconds in batches]
    assert min(paces) * 0.999 <= pace.seconds(1) <= max(paces) * 1.001


def test_a_worker_has_hung_after_twenty_times_what_is_expected_once_enough_is_known():
    pace = Pace()
    for _ in range(7):
        pace.learn(100, 1.0)
    assert pace.limit(100, 5.0, 300.0) == 300.0
    pace.learn(100, 1.0)
    assert pace.limit(100, 5.0, 300.0) == pytest.approx(20.0)
    assert pace.limit(10, 5.0, 300.0) == 5.0, "patience"
    assert pace.limit(10_000, 5.0, 300.0) == 300.0, "the most"


def test_as_many_patches_fit_into_a_time_as_the_pace_says_and_one_at_least():
    pace = Pace()
    assert pace.patches(1.0) is None
    pace.learn(1000, 2.0)
    assert (pace.patches(1.0), pace.patches(0.0001)) == (500, 1)


@given(st.integers(1, 2000), st.floats(0.0, 0.2), st.floats(0.00001, 0.001))
def test_passes_that_fill_a_time_by_pace_come_to_take_that_time(first, own, each):
    """A pass takes `own` seconds beside `each` for a patch, and patches are as many as one likes."""
    pace, patches = Pace(), first
    for _ in range(400):
        pace.learn(patches, own + each * patches)
        patches = pace.patches(0.25)
    assert 0.9 * 0.25 - each <= own + each * patches <= 1.1 * 0.25 + own / 4 + each
