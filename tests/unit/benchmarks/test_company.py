"""How the benchmark of company reads an answer's times."""

from __future__ import annotations

import pytest

from benchmarks.company import Answer


def test_a_pace_counts_the_tokens_of_its_span_and_the_longest_wait_lies_within_it():
    answer = Answer(asked=1.0, tokens=[2.0, 2.1, 2.2, 2.6, 2.7, 5.0])
    assert answer.first == 1.0
    assert answer.pace(2.2, 2.8) == pytest.approx(0.3), "the token at the beginning was there already"
    assert answer.longest(2.05, 2.8) == pytest.approx(0.4)


def test_a_span_without_a_token_is_as_slow_as_it_is_long():
    answer = Answer(asked=1.0, tokens=[2.0, 9.0])
    assert answer.pace(3.0, 8.0) == 5.0
    assert answer.longest(3.0, 8.0) == 5.0
