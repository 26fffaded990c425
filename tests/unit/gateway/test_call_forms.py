"""Calls as models of each family write them, wherever the text is cut: found, or given back as they were written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.output_parser import ArgumentsDelta, CallStart, OutputParser, TextDelta
from gateway.tool_format import ToolFormat
from tests.unit.gateway.test_output_parser import heard

CITY = {"type": "string"}
WEATHER = {
    "type": "object",
    "properties": {
        "city": CITY,
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "near": {"anyOf": [{"type": "array", "items": CITY}, {"type": "null"}]},
        "place": {"$ref": "#/$defs/place"},
        "unit": {"enum": ["C", "F"]},
    },
    "$defs": {"place": {"type": "object", "properties": {"zip": {"type": "string"}, "floors": {"type": "integer"}}}},
}
FUNCTIONS: dict[str, dict[str, Any]] = {"weather": WEATHER, "now": {}, "write": {"properties": {"text": CITY}}}
Heard = list[tuple[Any, ...]]
MADE = ("call", "weather", {"city": "Rome", "days": 2})

GLM_CALL = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
GLM: dict[str, tuple[str, Heard]] = {
    "a call": (f"\n{GLM_CALL}", [MADE]),
    "a call in one line": (GLM_CALL.replace("\n", ""), [MADE]),
    "words and two calls": (f"Let me see.\n{GLM_CALL}\n{GLM_CALL}\n", [("text", "Let me see."), MADE, MADE]),
    "no arguments": ("<tool_call>now\n</tool_call>", [("call", "now", {})]),
    "no arguments in one line": ("<tool_call>now</tool_call>", [("call", "now", {})]),
    "values by their schema": (
        (
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>10</arg_value>\n"
            "<arg_key>exact</arg_key>\n<arg_value>true</arg_value>\n"
            '<arg_key>near</arg_key>\n<arg_value>["Ostia", "Tivoli"]</arg_value>\n'
            '<arg_key>place</arg_key>\n<arg_value>{"zip": "00100", "floors": 3}</arg_value>\n'
            "<arg_key>unit</arg_key>\n<arg_value>C</arg_value>\n"
            "<arg_key>other</arg_key>\n<arg_value>7</arg_value>\n</tool_call>"
        ),
        [
            (
                "call",
                "weather",
                {
                    "city": "10",
                    "exact": True,
                    "near": ["Ostia", "Tivoli"],
                    "place": {"zip": "00100", "floors": 3},
                    "unit": "C",
                    "other": "7",
                },
            )
        ],
    ),
    "a text of several lines, and the end mark in it": (
        (
            "<tool_call>write\n<arg_key>text</arg_key>\n"
            "<arg_value>  naïve 🌍\n</tool_call> <b>\n</arg_value>\n</tool_call>!"
        ),
        [("call", "write", {"text": "  naïve 🌍\n</tool_call> <b>\n"}), ("text", "!")],
    ),
    "JSON of a strict function": (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>',
        [MADE],
    ),
    "cut off within a value": (GLM_CALL[:60], [("text", GLM_CALL[:60])]),
    "cut off between values": (
        GLM_CALL.partition("<arg_key>days")[0],
        [("text", GLM_CALL.partition("<arg_key>days")[0])],
    ),
    "cut off before its end mark": (GLM_CALL[:-4], [("text", GLM_CALL[:-4])]),
    "a value without an end": (
        "<tool_call>now<arg_key>a</arg_key><arg_value>b</tool_call> Hm.",
        [("text", "<tool_call>now<arg_key>a</arg_key><arg_value>b</tool_call> Hm.")],
    ),
    "a mention": (
        "One writes <tool_call> and </tool_call>, as in <tool_call>.",
        [("text", "One writes <tool_call> and </tool_call>, as in <tool_call>.")],
    ),
}

FAMILIES = {ToolFormat.GLM: GLM}
CASES = [(form, name) for form, cases in FAMILIES.items() for name in cases]


@pytest.mark.parametrize(("form", "name"), CASES, ids=lambda value: getattr(value, "name", value))
def test_a_familys_text_is_taken_apart_wherever_it_is_cut(form: ToolFormat, name: str) -> None:
    text, expected = FAMILIES[form][name]
    assert heard(text, form, functions=FUNCTIONS) == expected
    for cut in range(len(text) + 1):
        assert heard(text, form, [cut], functions=FUNCTIONS) == expected, cut
    assert heard(text, form, list(range(len(text))), functions=FUNCTIONS) == expected


FIRST_OF_TWO = {ToolFormat.GLM: (f"So: {GLM_CALL}", "\n<tool_call>")}


@pytest.mark.parametrize("form", FIRST_OF_TWO, ids=lambda form: form.name)
def test_a_call_is_told_with_its_last_sign_and_words_before_it_at_once(form: ToolFormat) -> None:
    text, following = FIRST_OF_TWO[form]
    parser = OutputParser(form, FUNCTIONS)
    assert parser.feed(text[:3]) == [TextDelta("So:")]
    assert parser.feed(text[3:-1]) == []
    start, arguments = parser.feed(text[-1])
    assert start == CallStart("weather")
    assert isinstance(arguments, ArgumentsDelta)
    assert json.loads(arguments.text) == MADE[2]
    assert parser.feed(following) == []
