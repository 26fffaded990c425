"""Offsets of tokens: as the characters of the whole text have them, wherever tokens cut it."""

from __future__ import annotations

from itertools import accumulate, pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.text_offsets import TextOffsets


@given(st.text(), st.lists(st.integers(0, 5)))
@example("図é", [1, 1, 1, 1, 1])
def test_a_token_stands_where_its_first_byte_is(text: str, sizes: list[int]) -> None:
    whole = text.encode()
    cuts = sorted({0, len(whole), *(cut for cut in accumulate(sizes) if cut < len(whole))})
    offsets, starts = TextOffsets(), [len(text[:n].encode()) for n in range(len(text) + 1)]
    for begin, end in pairwise(cuts):
        assert offsets.add(whole[begin:end]) == max(n for n, start in enumerate(starts) if start <= begin)


@given(st.lists(st.binary(max_size=3)))
@example([b"\xed\xa0"])
@example([b"\xed", b"\xa0", b"\x80"])
@settings(max_examples=300, derandomize=True, deadline=None)
def test_bytes_that_are_no_characters_count_as_the_text_shows_them(tokens: list[bytes]) -> None:
    offsets = TextOffsets()
    for token in tokens:
        offsets.add(token)
    mark = offsets.add(b"a")
    assert (b"".join(tokens) + b"a").decode(errors="replace")[mark:] == "a"
