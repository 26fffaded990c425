"""Which tokens complete a run that an answer cannot have."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from llm_service.engine.bad_words import BadWords

WORDS = st.integers(1, 4)
RUNS = st.lists(st.lists(WORDS, min_size=1, max_size=4).map(tuple), min_size=1, max_size=6)


@given(RUNS, st.lists(WORDS, max_size=8), WORDS)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_what_is_banned_is_what_would_complete_a_run_and_nothing_else(
    runs: list[tuple[int, ...]], output: list[int], last: int
) -> None:
    words = BadWords.of(runs)
    assert words is not None
    wanted = {word for word in range(5) if any((*output, last, word)[-len(run) :] == run for run in runs)}
    assert set(words.banned(array("i", [*output, last]))) == wanted
    assert set(words.banned(array("i", [*output, last][-words.reach :] if words.reach else []))) == wanted
    pairs = words.banned_behind(array("i", output))
    assert {*words.alone, *(second for first, second in pairs if first == last)} == wanted


def test_without_any_there_are_none() -> None:
    assert BadWords.of(()) is None
