"""The end of JSON is found wherever its text is cut, and what is none is seen as such."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tool_parsers.json_end import NO_JSON, NOT_YET, JsonEnd
from tests.unit.gateway.test_begun_calls import JSON

BITS = st.sampled_from([*'{}[],:"\\ \n', "1", "-2.5e3", "true", "a", '"a"', '"a":', "{}", "</x>"])


def found(text: str, cuts: list[int], begin: int = 0) -> int:
    search = JsonEnd()
    places = [search.find(text[:cut], begin) for cut in sorted(min(cut, len(text)) for cut in cuts)]
    end = search.find(text, begin)
    assert all(place in (NOT_YET, end) for place in places)
    assert end == NOT_YET or search.find(text + '}"', begin) == end
    return end


@given(
    st.lists(JSON, max_size=4) | st.dictionaries(st.text(), JSON, max_size=4),
    st.sampled_from([None, 1]),
    st.booleans(),
    st.sampled_from(["", "x", ' "{']),
    st.lists(st.integers(0, 200), max_size=6),
)
def test_the_end_of_json_is_found(
    value: Any, indent: int | None, ascii_alone: bool, rest: str, cuts: list[int]
) -> None:
    text = f"<{json.dumps(value, indent=indent, ensure_ascii=ascii_alone)}"
    assert found(text + rest, cuts, 1) == len(text)


@given(st.lists(BITS, max_size=12), st.lists(st.integers(0, 40), max_size=6))
def test_what_is_taken_for_none_is_none(bits: list[str], cuts: list[int]) -> None:
    text = "".join(bits)
    assert found(text, cuts) == found(text, [])
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return
    assert found(text, cuts) == (len(text.rstrip()) if isinstance(value, (dict, list)) else NO_JSON)


@pytest.mark.parametrize(
    "text",
    [
        '{\\"',
        "{a",
        "{,",
        "{]",
        "{1",
        '{"a"}',
        '{"a",',
        '{"a":}',
        '{"a":1:',
        '{"a":1 2',
        '{"a":1,}',
        "[1,]",
        "[1:",
        "[}",
        "<",
        "1",
    ],
)
def test_json_does_not_go_on_so(text: str) -> None:
    assert found(text, list(range(len(text)))) == NO_JSON


@pytest.mark.parametrize("text", ["", "{", '{"', '{"a\\', '{"a\n</x>', '{"a":tr', '{"a":[{}', "[1, "])
def test_json_may_go_on_so(text: str) -> None:
    assert found(text, list(range(len(text)))) == NOT_YET
