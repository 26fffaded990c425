"""Texts are cut at special tokens as the tokenizers library cuts them, in a time that grows with the text alone."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from llm_service.prompt.special_tokens import SpecialTokens

NAMES = ("<a>", "<ab>", "<a", "[b]", "<a><b", "c c")


def entries(names: tuple[str, ...] = NAMES, **more: bool) -> list[dict[str, Any]]:
    return [{"content": name, "id": number, **more} for number, name in enumerate(names, 1)]


@given(st.text("<>ab[] c\n", max_size=30))
@settings(max_examples=500, deadline=None, derandomize=True)
def test_the_longest_name_at_a_place_counts(text: str) -> None:
    found = re.split(f"({'|'.join(map(re.escape, sorted(NAMES, key=len, reverse=True)))})", text)
    wanted = [NAMES.index(piece) + 1 if piece in NAMES else piece for piece in found if piece]
    assert list(SpecialTokens(entries()).split(text)) == wanted


@pytest.mark.parametrize("strips", [{}, {"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}])
@given(text=st.lists(st.sampled_from(["<a>", "<b>", " ", "\n", "\u2003", "x", "<"]), max_size=12).map("".join))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_space_goes_with_those_tokens_that_take_it(strips: dict[str, bool], text: str) -> None:
    names = ("<a>", "<b>")
    tokenizer = Tokenizer(models.BPE({sign: number for number, sign in enumerate(" \n\u2003x<ab>")}, []))
    tokenizer.add_special_tokens([AddedToken(names[0], normalized=False, **strips), names[1]])
    made = SpecialTokens([*entries(names[:1], **strips), *entries(names)[1:]])
    found = [names[piece - 1] if isinstance(piece, int) else piece for piece in made.split(text)]
    assert [sign for piece in found for sign in ([piece] if piece in names else piece)] == [
        sign.strip() if sign.strip() in names else sign for sign in tokenizer.encode(text).tokens
    ]


def test_space_is_read_once_before_a_token_that_would_take_it() -> None:
    """Where each space of a megabyte is tried for a beginning, that takes half an hour."""
    space = " " * (1 << 20)
    made = SpecialTokens(entries(("<mask>",), lstrip=True))
    assert list(made.split(f"{space}<mask>{space}")) == [1, space]


def test_a_tokenizer_without_special_tokens_leaves_texts_whole() -> None:
    assert list(SpecialTokens([]).split("<a> b")) == ["<a> b"]
    assert list(SpecialTokens([]).split("")) == []
