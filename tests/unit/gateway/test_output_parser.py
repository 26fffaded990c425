"""What a model says is taken apart the same way wherever its text is cut; what is no call is its words."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.output_parser import ArgumentsDelta, CallStart, OutputParser, Piece, ReasoningDelta, TextDelta
from gateway.tool_parsers.tool_format import ToolFormat
from twinlens import v1

FUNCTIONS: dict[str, dict[str, Any]] = {
    "weather": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "deep": {"type": "object"},
            "code": {"type": "string"},
        }
    },
    "now": {},
}


def whole(pieces: list[Piece]) -> list[tuple[Any, ...]]:
    """What was said, thought and called, in order, however it came."""
    out: list[list[Any]] = []
    for piece in pieces:
        match piece:
            case TextDelta(text) | ReasoningDelta(text):
                kind = "text" if isinstance(piece, TextDelta) else "reasoning"
                if out and out[-1][0] == kind:
                    out[-1][1] += text
                else:
                    out.append([kind, text])
            case CallStart(name):
                out.append(["call", name, ""])
            case ArgumentsDelta(text):
                out[-1][2] += text
    return [(kind, name, json.loads(rest[0])) if rest else (kind, name) for kind, name, *rest in out]


def heard(
    text: str,
    form: ToolFormat,
    cuts: list[int] | None = None,
    *,
    thinking: bool = False,
    functions: dict[str, dict[str, Any]] = FUNCTIONS,
    **settings: Any,
) -> list[tuple[Any, ...]]:
    parser = OutputParser(form, functions, **settings)
    parser.begin(v1.GenerateStarted(thinking=thinking))
    pieces: list[Piece] = []
    places = [0, *sorted(cuts or []), len(text)]
    for start, end in pairwise(places):
        pieces += parser.feed(text[start:end])
    return whole([*pieces, *parser.end()])


J, X = ToolFormat.JSON, ToolFormat.XML
CALL_J = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
CALL_X = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
MADE = ("call", "weather", {"city": "Rome", "days": 2})

CASES: dict[str, tuple[str, ToolFormat, dict[str, Any], list[tuple[Any, ...]]]] = {
    "words": ("Hello\n there ", J, {}, [("text", "Hello\n there ")]),
    "nothing": ("", J, {}, []),
    "a JSON call": (CALL_J, J, {}, [MADE]),
    "an XML call": (CALL_X, X, {}, [MADE]),
    "words and a call": (f"Let me see.\n\n{CALL_J}\n", J, {}, [("text", "Let me see."), MADE]),
    "two calls": (f"{CALL_J}\n{CALL_J}", J, {}, [MADE, MADE]),
    "two XML calls": (f"{CALL_X}\n{CALL_X}\n", X, {}, [MADE, MADE]),
    "one of two": (f"{CALL_J}\n{CALL_J}", J, {"single": True}, [MADE]),
    "words after a call": (f"{CALL_J}\nDone.", J, {}, [MADE, ("text", "\nDone.")]),
    "reasoning": ("<think>\nHm.\nSo.\n</think>\n\nYes.", J, {}, [("reasoning", "Hm.\nSo."), ("text", "Yes.")]),
    "reasoning from the start": (
        "Hm.\n</think>\n\nYes.",
        J,
        {"thinking": True},
        [("reasoning", "Hm."), ("text", "Yes.")],
    ),
    "reasoning and a call": (f"<think>\nHm.\n</think>\n\n{CALL_X}", X, {}, [("reasoning", "Hm."), MADE]),
    "no reasoning": ("<think>\n\n</think>\n\nYes.", J, {}, [("text", "Yes.")]),
    "reasoning without end": ("<think>Hm. </thi", J, {}, [("reasoning", "Hm. </thi")]),
    "a mark later on": ("I say <think> now", J, {}, [("text", "I say <think> now")]),
    "nearly a mark": ("<thin ice", J, {}, [("text", "<thin ice")]),
    "nearly a call": ("a <tool_cal b <tool_", J, {}, [("text", "a <tool_cal b <tool_")]),
    "no tools": (CALL_J, ToolFormat.NONE, {}, [("text", CALL_J)]),
    "a strict call": (
        f"So.\n{CALL_J}{CALL_X}",
        X,
        {},
        [("text", "So."), MADE, MADE],
    ),
    "a strict call with a mark inside": (
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
        X,
        {},
        [("call", "f", {"a": "</tool_call>"})],
    ),
    "no JSON": ("Hm.\n<tool_call>{nope}</tool_call> So.", J, {}, [("text", "Hm.\n<tool_call>{nope}</tool_call> So.")]),
    "no name": (
        '<tool_call>{"arguments": {}}</tool_call>',
        J,
        {},
        [("text", '<tool_call>{"arguments": {}}</tool_call>')],
    ),
    "no object": (
        '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
        J,
        {},
        [("text", '<tool_call>{"name": "f", "arguments": 5}</tool_call>')],
    ),
    "NaN": (
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        J,
        {},
        [("text", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>')],
    ),
    "half a pair of surrogates": (
        r'<tool_call>{"name": "f", "arguments": {"a": "\ud83d"}}</tool_call>',
        J,
        {},
        [("text", r'<tool_call>{"name": "f", "arguments": {"a": "\ud83d"}}</tool_call>')],
    ),
    "a number without an end": (
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
        J,
        {},
        [("text", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>')],
    ),
    "a list": ("<tool_call>[]</tool_call>", J, {}, [("text", "<tool_call>[]</tool_call>")]),
    "too deep": ("<tool_call>" + "[" * 100_000, J, {}, [("text", "<tool_call>" + "[" * 100_000)]),
    "no end, but whole": (CALL_J.removesuffix("</tool_call>"), J, {}, [MADE]),
    "cut off": ("So:\n" + CALL_J[:40], J, {}, [("text", "So:\n" + CALL_J[:40])]),
    "cut off in XML": (CALL_X[:60], X, {}, [("text", CALL_X[:60])]),
    "an end mark in a text": (
        '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call> \\" x"}}</tool_call>!',
        J,
        {},
        [("call", "weather", {"city": '</tool_call> " x'}), ("text", "!")],
    ),
    "a good one after a bad one": (
        f"<tool_call>bad</tool_call>\n{CALL_J}",
        J,
        {},
        [("text", "<tool_call>bad</tool_call>"), MADE],
    ),
    "no parameters": ("<tool_call><function=now></function></tool_call>", X, {}, [("call", "now", {})]),
    "an unknown function": (
        "<tool_call><function=f><parameter=a>5</parameter></function></tool_call>",
        X,
        {},
        [("call", "f", {"a": "5"})],
    ),
    "values by their schema": (
        (
            '<tool_call><function=weather><parameter=deep>{"a": [1]}</parameter><parameter=days>two</parameter>'
            "<parameter=code>\n if x:\n   y < 5\n</parameter></function></tool_call>"
        ),
        X,
        {},
        [("call", "weather", {"deep": {"a": [1]}, "days": "two", "code": " if x:\n   y < 5"})],
    ),
    "something between parameters": (
        "<tool_call><function=now>hm</function></tool_call>",
        X,
        {},
        [("text", "<tool_call><function=now>hm</function></tool_call>")],
    ),
    "a call in reasoning that has no end": (
        f"I should call it.\n{CALL_X}\nDone.",
        X,
        {"thinking": True},
        [("reasoning", "I should call it."), MADE, ("text", "\nDone.")],
    ),
    "a JSON call in reasoning": (f"<think>Hm.\n\n{CALL_J}", J, {}, [("reasoning", "Hm."), MADE]),
    "two calls in reasoning": (f"Hm.\n{CALL_J}\n{CALL_J}", J, {"thinking": True}, [("reasoning", "Hm."), MADE, MADE]),
    "a mention in reasoning": (
        f"I write <tool_call> and {{.\n</think>\n{CALL_X}",
        X,
        {"thinking": True},
        [("reasoning", "I write <tool_call> and {."), MADE],
    ),
    "a call in reasoning of what is not offered": (
        '<tool_call>{"name": "f", "arguments": {}}</tool_call> Hm.</think>So.',
        J,
        {"thinking": True},
        [("reasoning", '<tool_call>{"name": "f", "arguments": {}}</tool_call> Hm.'), ("text", "So.")],
    ),
    "half a call in reasoning, and a whole one behind it": (
        f'Hm. <tool_call> {{"name": \n</think>\n\nYes. {CALL_J}',
        J,
        {"thinking": True},
        [("reasoning", 'Hm. <tool_call> {"name":'), ("text", "Yes."), MADE],
    ),
    "half a call in reasoning": (
        "Hm.\n<tool_call>\n<function=weather>\n ",
        X,
        {"thinking": True},
        [("reasoning", "Hm.\n<tool_call>\n<function=weather>")],
    ),
    "a mention and a call": (
        f"Between <tool_call> tags:\n{CALL_J}",
        J,
        {},
        [("text", "Between <tool_call> tags:"), MADE],
    ),
    "no arguments in JSON": ('<tool_call>{"name": "now"}</tool_call>', J, {}, [("call", "now", {})]),
    "no arguments in JSON, of what is not offered": (
        '<tool_call>{"name": "Ann"}</tool_call>',
        J,
        {},
        [("text", '<tool_call>{"name": "Ann"}</tool_call>')],
    ),
    "XML without its mark": (
        f"So.\n{CALL_X.removeprefix('<tool_call>')}\n",
        X,
        {},
        [("text", "So."), MADE],
    ),
    "XML without its mark, twice": (CALL_X.removeprefix("<tool_call>\n") * 2, X, {}, [MADE, MADE]),
    "XML without any mark": (CALL_X[12:-13], X, {}, [MADE]),
    "a mention of a function": (
        f"Say <function=nothing> or <function=wea\n{CALL_X}",
        X,
        {},
        [("text", "Say <function=nothing> or <function=wea"), MADE],
    ),
    "two functions within one mark": (
        (
            "<tool_call>\n<function=now>\n</function>\n<function=weather>\n<parameter=days>\n2\n</parameter>\n"
            "</function>\n</tool_call>"
        ),
        X,
        {},
        [("call", "now", {}), ("call", "weather", {"days": 2})],
    ),
    "functions without an end": (
        "<tool_call><function=now><function=weather><parameter=days>2</parameter>\n</tool_call>!",
        X,
        {},
        [("call", "now", {}), ("call", "weather", {"days": 2}), ("text", "!")],
    ),
    "an end mark in a value": (
        "<tool_call><function=weather>\n<parameter=code>\na </tool_call> b\n</parameter>\n</function></tool_call>",
        X,
        {},
        [("call", "weather", {"code": "a </tool_call> b"})],
    ),
    "the end of a parameter in a value": (
        "<tool_call><function=weather>\n<parameter=code>\n<a></parameter></a>\n</parameter>\n</function></tool_call>",
        X,
        {},
        [("call", "weather", {"code": "<a></parameter></a>"})],
    ),
    "a whole call in a value": (
        f"<tool_call><function=weather>\n<parameter=code>\n{CALL_X}\n</parameter>\n</function></tool_call>",
        X,
        {},
        [("call", "weather", {"code": CALL_X})],
    ),
    "a value without an end": (
        f"<tool_call><function=weather><parameter=code>x</function></tool_call> So {CALL_J}",
        X,
        {},
        [("text", "<tool_call><function=weather><parameter=code>x</function></tool_call> So"), MADE],
    ),
    "a form with a call in a text": (
        f' {{"a": "{CALL_X}"}}',
        X,
        {"constrained": True, "calls_or_form": True},
        [("text", f' {{"a": "{CALL_X}"}}')],
    ),
    "reasoning before a form": (
        "\n<think>\nHm.\n</think>\n\n[1]",
        J,
        {"form_text": "a+"},
        [("reasoning", "Hm."), ("text", "[1]")],
    ),
    "a form that has the mark": (
        "<think>1</think>2",
        J,
        {"form_text": r"<think>\d</think>\d"},
        [("text", "<think>1</think>2")],
    ),
    "reasoning before arguments": (
        '<think>Hm.</think>{"city": "Rome", "days": 2}',
        ToolFormat.ARGUMENTS,
        {},
        [("reasoning", "Hm."), MADE],
    ),
    "calls in the place of a form": (f"\n{CALL_J}\n{CALL_J}", J, {"calls_or_form": True}, [MADE, MADE]),
    "half a mark in the place of a form": ("<tool", J, {"calls_or_form": True}, [("text", "<tool")]),
    "a list that had to be": (
        '[{"name": "weather", "parameters": {"city": "Rome", "days": 2}}, {"name": "now", "parameters": {}}]',
        ToolFormat.LIST,
        {},
        [MADE, ("call", "now", {})],
    ),
    "a list that a stop text ends": ('[{"name": "weather"', ToolFormat.LIST, {}, [("text", '[{"name": "weather"')]),
    "a list that a stop text ends behind a call": (
        '[ {"name": "weather", "parameters": {"city": "Rome", "days": 2}} , {"name": "now", "parameters": {"a"',
        ToolFormat.LIST,
        {},
        [MADE, ("text", ' , {"name": "now", "parameters": {"a"')],
    ),
    "a list with what is no call": (
        '[{"name": "now"}, {"name": "now", "parameters": {}}]',
        ToolFormat.LIST,
        {},
        [("text", '[{"name": "now"}'), ("call", "now", {})],
    ),
    "a list that is none": ('[{"name" "now"}, "now"]', ToolFormat.LIST, {}, [("text", '[{"name" "now"}, "now"]')]),
    "arguments that had to be": ('{"city": "Rome", "days": 2}', ToolFormat.ARGUMENTS, {}, [MADE]),
    "arguments that a stop text ends": ('{"city": "Ro', ToolFormat.ARGUMENTS, {}, [("text", '{"city": "Ro')]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_text_is_taken_apart(name: str) -> None:
    text, form, settings, expected = CASES[name]
    assert heard(text, form, **settings) == expected


@pytest.mark.parametrize("name", [name for name in CASES if name != "too deep"])
def test_it_does_not_matter_where_a_text_is_cut(name: str) -> None:
    text, form, settings, expected = CASES[name]
    for cut in range(len(text) + 1):
        assert heard(text, form, [cut], **settings) == expected, cut
    assert heard(text, form, list(range(len(text))), **settings) == expected


MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "<function=now>", "</function>"]
MARKS += ["<parameter=a>", "</parameter>"]
BITS = st.sampled_from([*MARKS, '{"name": "f", "arguments": {}}', *('"', "\\", "{", "}", "\n", " ", "x", "<")])


@given(st.lists(BITS, max_size=12), st.lists(st.integers(0, 200), max_size=6), st.sampled_from([J, X]), st.booleans())
def test_nothing_that_a_model_says_breaks_anything(
    bits: list[str], cuts: list[int], form: ToolFormat, thinking: bool
) -> None:
    text = "".join(bits)
    places = [min(cut, len(text)) for cut in cuts]
    assert heard(text, form, places, thinking=thinking) == heard(text, form, thinking=thinking)


def test_words_are_held_back_no_longer_than_they_may_be_a_mark() -> None:
    parser = OutputParser(J, FUNCTIONS)
    assert parser.feed("Hello") == [TextDelta("Hello")]
    assert parser.feed(" ") == []
    assert parser.feed("you <") == [TextDelta(" you")]
    assert parser.feed("b") == [TextDelta(" <b")]


def test_arguments_that_had_to_be_come_as_they_are_said() -> None:
    parser = OutputParser(ToolFormat.ARGUMENTS, {"weather": {}}, streams=True)
    assert parser.feed('{"ci') == [CallStart("weather"), ArgumentsDelta('{"ci')]
    assert parser.feed('ty"') == [ArgumentsDelta('ty"')]


@pytest.mark.parametrize("form", [J, X])
def test_a_text_in_a_call_is_read_once_though_the_end_mark_and_quotes_are_in_it(form: ToolFormat) -> None:
    """Read anew with each piece, it would take hours."""
    code = 'print("</tool_call>")\n' * 2000
    text = f"<tool_call>{json.dumps({'name': 'weather', 'arguments': {'code': code}})}</tool_call>"
    assert heard(text, form, list(range(0, len(text), 7))) == [("call", "weather", {"code": code})]
