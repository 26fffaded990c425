"""Streams tell calls as they come: the function's name first, then its arguments, piece by piece, which together are
those of the whole answer."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.output_parser import ArgumentsDelta, CallStart, OutputParser, Piece, ReasoningDelta, TextDelta
from gateway.tool_parsers.arguments import parsed
from gateway.tool_parsers.begun import JsonCopy
from gateway.tool_parsers.registry import TOOL_PARSERS
from gateway.tool_parsers.tool_format import ToolFormat
from tests.unit.gateway.test_tool_parsers import BITS, CALLS, FAMILIES, FUNCTIONS, LONG, SECTION

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(), JSON, max_size=4)


def told(text: str, form: ToolFormat, cuts: list[int], *, streams: bool = True, **settings: Any) -> list[list[str]]:
    """What was said and called, in order, however it came; of calls the arguments as they were written."""
    parser = OutputParser(form, FUNCTIONS, streams=streams, **settings)
    pieces: list[Piece] = []
    for start, end in pairwise([0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]):
        pieces += parser.feed(text[start:end])
    out: list[list[str]] = []
    for piece in [*pieces, *parser.end()]:
        match piece:
            case CallStart(name):
                out.append(["call", name, ""])
            case TextDelta(said) | ReasoningDelta(said) if not (out and out[-1][0] == "text"):
                out.append(["text", said])
            case TextDelta(said) | ReasoningDelta(said) | ArgumentsDelta(said):
                out[-1][-1] += said
    return out


def complete(found: list[list[str]]) -> list[list[str]]:
    """The same without calls that were begun and never ended."""
    out: list[list[str]] = []
    for each in found:
        if each[0] == "call" and parsed(each[2]) is None:
            continue
        if each[0] == "text" and out and out[-1][0] == "text":
            out[-1] = ["text", out[-1][1] + each[1]]
        else:
            out.append(each)
    return out


def test_the_name_goes_out_first_and_arguments_as_they_come() -> None:
    parser = OutputParser(ToolFormat.JSON, FUNCTIONS, streams=True)
    assert parser.feed('<tool_call>\n{"name": "wea') == []
    assert parser.feed('ther", "arguments": ') == []
    assert parser.feed('{"ci') == [CallStart("weather"), ArgumentsDelta('{"ci')]
    assert parser.feed('ty":"Ro') == [ArgumentsDelta('ty": "Ro')]
    assert parser.feed('me\\n", "days":2') == [ArgumentsDelta('me\\n", "days": ')]
    assert parser.feed(" }") == [ArgumentsDelta("2")]
    assert parser.feed("}\n") == []
    assert parser.feed("</tool_call>") == [ArgumentsDelta("}")]
    assert (parser.end(), parser.calls) == ([], 1)


@pytest.mark.parametrize(
    ("form", "before", "behind"),
    [
        (ToolFormat.JSON, '<tool_call>{"name": "write", "arguments": ', "}</tool_call>"),
        (ToolFormat.XML, '<tool_call>{"name": "write", "arguments": ', "}</tool_call>"),
        (ToolFormat.MISTRAL, "[TOOL_CALLS]write[ARGS]", ""),
        (ToolFormat.MISTRAL, '[TOOL_CALLS][{"name": "write", "arguments": ', "}]"),
        (ToolFormat.KIMI, SECTION[0] + "<|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>", None),
        (ToolFormat.DEEPSEEK, f"{CALLS[0]}<｜tool▁call▁begin｜>write<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        (
            ToolFormat.DEEPSEEK,
            f"{CALLS[0]}<｜tool▁call▁begin｜>function<｜tool▁sep｜>write\n```json\n",
            f"\n```<｜tool▁call▁end｜>{CALLS[1]}",
        ),
        (ToolFormat.GRANITE, '<|tool_call|>[{"name": "write", "arguments": ', "}]"),
        (ToolFormat.HUNYUAN, '<tool_calls>[{"name": "write", "arguments": ', "}]</tool_calls>"),
        (ToolFormat.PHI, 'functools[{"name": "write", "arguments": ', "}]"),
    ],
)
def test_forms_with_arguments_in_json_are_told_so(form: ToolFormat, before: str, behind: str | None) -> None:
    behind = f"<|tool_call_end|>{SECTION[1]}" if behind is None else behind
    parser = OutputParser(form, FUNCTIONS, streams=True)
    assert parser.feed(before + '{"text": "so') == [CallStart("write"), ArgumentsDelta('{"text": "so')]
    pieces = [*parser.feed(' be it"}'), *parser.feed(behind), *parser.end()]
    assert all(isinstance(piece, ArgumentsDelta) for piece in pieces)
    assert "".join(piece.text for piece in pieces if isinstance(piece, ArgumentsDelta)) == ' be it"}'


@pytest.mark.parametrize("name", [(form, name) for form, cases in FAMILIES.items() for name in cases], ids=str)
def test_what_is_well_formed_is_the_same_streamed_and_whole(name: tuple[ToolFormat, str]) -> None:
    form, text = name[0], FAMILIES[name[0]][name[1]][0]
    whole = told(text, form, [], streams=False)
    streamed = told(text, form, [])
    for cut in range(len(text)):
        assert told(text, form, [cut]) == streamed, cut
    assert told(text, form, list(range(len(text)))) == streamed
    assert complete(streamed) == whole


@pytest.mark.parametrize(
    ("arguments", "copied"),
    [
        ('{"city": "Rome"', '{"city": "Rome"'),
        ('{"city": Rome}}\n</tool_call>', '{"city": '),
        ('{"city": "Rome\\x"}}</tool_call>', '{"city": "Rome'),
        ('{"city": "\\ud83d"}}</tool_call>', '{"city": "'),
        ('{"city": "a", "city": "b"}}</tool_call>', '{"city": "a", "city": "b"'),
        ('{"days": NaN}}</tool_call>', '{"days": '),
        ('{"days": [1,]}}</tool_call>', '{"days": [1, '),
        ('{"city": "Rome"}, 5}</tool_call>', '{"city": "Rome"'),
    ],
)
def test_a_call_that_turns_out_malformed_stays_open_and_comes_back_as_words(arguments: str, copied: str) -> None:
    text = f'So: <tool_call>{{"name": "weather", "arguments": {arguments}'
    assert told(text, ToolFormat.JSON, [], streams=False) == [["text", text]]
    words = text.removeprefix("So:")
    for cut in range(len(text)):
        found = told(text, ToolFormat.JSON, [cut])
        assert found == [["text", "So:"], ["call", "weather", copied], ["text", words]], cut
    parser = OutputParser(ToolFormat.JSON, FUNCTIONS, streams=True)
    parser.feed(text)
    parser.end()
    assert parser.calls == 0


@pytest.mark.parametrize("form", [ToolFormat.MISTRAL, ToolFormat.GRANITE, ToolFormat.HUNYUAN, ToolFormat.PHI], ids=str)
def test_what_stands_too_far_behind_its_mark_begins_no_call(form: ToolFormat) -> None:
    text = TOOL_PARSERS[form].begin + " " * 65 + '{"name": "weather", "arguments": {"city": "Rome"}}'
    for cut in range(len(text)):
        assert told(text, form, [cut]) == [["text", text]], cut


def test_a_call_without_mistrals_list_begins_none() -> None:
    text = '[TOOL_CALLS]{"name": "weather", "arguments": {"city": "Rome"}}'
    for cut in range(len(text)):
        assert told(text, ToolFormat.MISTRAL, [cut]) == [["text", text]], cut


def test_one_call_alone_is_told_where_it_is_to_be_so_and_none_of_other_functions() -> None:
    other = CALL.replace("weather", "other")
    for cut in range(len(CALL) * 2):
        assert told(CALL + CALL, ToolFormat.JSON, [cut], single=True) == told(CALL, ToolFormat.JSON, [], streams=False)
    parser = OutputParser(ToolFormat.JSON, FUNCTIONS, streams=True)
    assert parser.feed(other.removesuffix("</tool_call>")) == []
    assert parser.feed("</tool_call>")[0] == CallStart("other")


@given(st.lists(BITS, max_size=14), st.lists(st.integers(0, 300), max_size=6), st.sampled_from(list(FAMILIES)))
def test_no_cut_matters(bits: list[str], cuts: list[int], form: ToolFormat) -> None:
    text = "".join(bits)
    streamed = told(text, form, [])
    assert told(text, form, cuts) == streamed
    assert complete(streamed) == told(text, form, [], streams=False)


@given(
    OBJECTS,
    st.booleans(),
    st.sampled_from([None, 1]),
    st.sampled_from([(",", ":"), (", ", ": "), (" , ", "\n:\t")]),
    st.lists(st.integers(0, 200), max_size=6),
)
def test_pieces_of_arguments_are_those_of_the_whole(
    value: dict[str, Any], ascii_alone: bool, indent: int | None, signs: tuple[str, str], cuts: list[int]
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_alone, indent=indent, separators=signs)
    copy = JsonCopy()
    copied = "".join(copy.more("x" + text[:cut], 1) for cut in [*sorted(cuts), *range(len(text) + 1)[-1:]])
    assert json.dumps(value, ensure_ascii=False).startswith(copied)
    said = f'<tool_call>{{"name": "write", "arguments": {text}}}</tool_call>'
    assert told(said, ToolFormat.JSON, cuts) == told(said, ToolFormat.JSON, [], streams=False)


def test_a_long_call_is_copied_once() -> None:
    """Copied anew with each piece, it would take hours."""
    text = f"<tool_call>{json.dumps({'name': 'write', 'arguments': {'text': LONG}})}</tool_call>"
    found = told(text, ToolFormat.JSON, list(range(0, len(text), 7)))
    assert found == [["call", "write", json.dumps({"text": LONG})]]
