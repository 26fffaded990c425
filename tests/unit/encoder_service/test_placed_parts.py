"""Where the rows of what stands for an item are, by the places that transformers gives the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from common.media.item import PromptPart
from encoder_service.models.processor import placed_parts

WORDS = {"a": 1, "b": 2, "(": 3, ")": 4, ",": 5, "f": 7, "s": 9}


def placed(prompt: str, where: Sequence[int], *parts: PromptPart) -> tuple[PromptPart, ...]:
    """Of a prompt, a sign for each token, whose tokens are at the same place on each axis."""
    ids = [WORDS[sign] for sign in prompt]
    return placed_parts(parts, ids, np.array([where] * 3), [7, 9], lambda text: [WORDS[sign] for sign in text])


def told(parts: Sequence[PromptPart]) -> list[tuple[str, int, list[int], int]]:
    return [
        (part.text, part.rows, np.frombuffer(part.positions, "<i4").reshape(3, -1)[0].tolist(), part.advance)
        for part in parts
    ]


def test_runs_that_meet_are_counted_from_one_place() -> None:
    parts = (PromptPart("", 2, 7), PromptPart("", 1, 9), PromptPart("", 1, 7), PromptPart("", 2, 9))
    found = placed("affsfssb", [0, 1, 1, 1, 6, 2, 3, 4], *parts)
    assert told(found) == [("", 2, [0, 0], 0), ("", 1, [0], 0), ("", 1, [5], 0), ("", 2, [1, 2], 3)]


def test_a_mark_at_the_place_of_the_one_before_it_is_told_with_the_rows_behind_it() -> None:
    found = placed("a(f)b", [0, 0, 1, 2, 2], PromptPart("(", 1, 7), PromptPart(")"))
    assert told(found) == [("(", 1, [-1, 0], 1), (")", 0, [], -1)]


def test_marks_between_rows_and_behind_them_have_places_of_their_own() -> None:
    parts = PromptPart("(", 1, 7), PromptPart("),(", 1, 7), PromptPart(")")
    found = placed("a(f),(f)b", [0, 0, 1, 8, 9, 1, 4, 5, 9], *parts)
    assert told(found) == [("(", 1, [-1, 0], 7), ("),(", 1, [-9, -6], -5), (")", 0, [], 3)]


def test_what_is_behind_the_last_rows_may_stand_before_them() -> None:
    found = placed("af,)b", [0, 1, 2, 0, 9], PromptPart("", 1, 7), PromptPart(",)"))
    assert told(found) == [("", 1, [0], 1), (",)", 0, [-3], 6)]


def test_texts_between_rows_count_on() -> None:
    found = placed("af,fb", [0, 1, 5, 6, 9], PromptPart("", 1, 7), PromptPart(",", 1, 7))
    assert told(found) == [("", 1, [0], 4), (",", 1, [0], 3)]


@pytest.mark.parametrize(
    ("prompt", "where", "parts"),
    [
        ("af,,fb", [0, 1, 2, 4, 5, 6], (PromptPart("", 1, 7), PromptPart(",(", 1, 7))),
        ("ab(fb", [0, 5, 6, 7, 8], (PromptPart("(", 1, 7),)),
        ("af)bb", [0, 1, 2, 3, 9], (PromptPart("", 1, 7), PromptPart(")"))),
        ("a(f)b", [0, 0, 1, 2, 9], (PromptPart("", 1, 7), PromptPart(")"))),
    ],
    ids=["between rows", "before the item", "behind the item", "in the middle of a text"],
)
def test_other_places_of_texts_are_refused(prompt: str, where: list[int], parts: tuple[PromptPart, ...]) -> None:
    with pytest.raises(ValueError, match="positions of its own"):
        placed(prompt, where, *parts)
