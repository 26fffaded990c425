"""Calls as models of each family write them, wherever the text is cut: found, or given back as they were written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.output_parser import ArgumentsDelta, CallStart, OutputParser, TextDelta
from gateway.tool_parsers.tool_format import ToolFormat
from tests.unit.gateway.test_output_parser import heard, whole
from twinlens import v1

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
    "a mention and a call": (f"I write <tool_call> first. {GLM_CALL}", [("text", "I write <tool_call> first."), MADE]),
    "a mention": (
        "One writes <tool_call> and </tool_call>, as in <tool_call>.",
        [("text", "One writes <tool_call> and </tool_call>, as in <tool_call>.")],
    ),
}

LISTED = '[{"name": "weather", "arguments": {"city": "Rome", "days": 2}}'
NAMED = '[TOOL_CALLS]weather[ARGS]{"city": "Rome", "days": 2}'
MISTRAL: dict[str, tuple[str, Heard]] = {
    "a list": (f"[TOOL_CALLS] {LISTED}]", [MADE]),
    "a list with ids": (f'[TOOL_CALLS]{LISTED[:-1]}, "id": "bbc5b7ede"}}]', [MADE]),
    "a list of two": (f'[TOOL_CALLS]{LISTED}, {{"name": "now", "arguments": {{}}}}]', [MADE, ("call", "now", {})]),
    "a call by its name": (NAMED, [MADE]),
    "a call with an id": (NAMED.replace("[ARGS]", "[CALL_ID]bbc5b7ede[ARGS]"), [MADE]),
    "words and two calls": (
        f"Let me see.{NAMED}[TOOL_CALLS]now[ARGS]{{}}",
        [("text", "Let me see."), MADE, ("call", "now", {})],
    ),
    "texts with brackets, quotes and marks": (
        r"""[TOOL_CALLS]write[ARGS]{"text": "} \" ] [TOOL_CALLS]now[ARGS]{} \\", "deep": [{"a": ["é🌍"]}]}""",
        [("call", "write", {"text": '} " ] [TOOL_CALLS]now[ARGS]{} \\', "deep": [{"a": ["é🌍"]}]})],
    ),
    "words behind calls": (f"{NAMED} So be it.", [MADE, ("text", " So be it.")]),
    "cut off in its arguments": (f"So: {NAMED[:-4]}", [("text", f"So: {NAMED[:-4]}")]),
    "cut off in its name": ("[TOOL_CALLS]weath", [("text", "[TOOL_CALLS]weath")]),
    "cut off before its arguments": ("[TOOL_CALLS]now[ARGS]", [("text", "[TOOL_CALLS]now[ARGS]")]),
    "a list cut off": (f"[TOOL_CALLS]{LISTED}", [("text", f"[TOOL_CALLS]{LISTED}")]),
    "a list of what is no call": ("[TOOL_CALLS] [1, 2] Hm.", [("text", "[TOOL_CALLS] [1, 2] Hm.")]),
    "arguments that are no object": ("[TOOL_CALLS]now[ARGS][1]", [("text", "[TOOL_CALLS]now[ARGS][1]")]),
    "arguments that are broken": (f"[TOOL_CALLS]now[ARGS]{{a}}{NAMED}", [("text", "[TOOL_CALLS]now[ARGS]{a}"), MADE]),
    "a mention": (
        f"Say [TOOL_CALLS] and a name, [ARGS]: {NAMED}",
        [("text", "Say [TOOL_CALLS] and a name, [ARGS]:"), MADE],
    ),
}

SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def kimi(name: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


MARKED = {"text": 'ü<|tool_call_end|>"'}
ROME = kimi("functions.weather:0", '{"city": "Rome", "days": 2}')
KIMI: dict[str, tuple[str, Heard]] = {
    "a call": (f"{SECTION[0]}{ROME}{SECTION[1]}", [MADE]),
    "a call with blanks": (
        f"I look. \n{SECTION[0]}\n{ROME.replace(':0', ':0 ')}\n{SECTION[1]}\n",
        [("text", "I look."), MADE],
    ),
    "two calls, one of no arguments": (
        f"{SECTION[0]}{ROME}{kimi('functions.now:1', '')}{SECTION[1]}",
        [MADE, ("call", "now", {})],
    ),
    "a name alone": (f"{SECTION[0]}{kimi('weather:3', '{}')}{SECTION[1]}", [("call", "weather", {})]),
    "lines, and a mark in a text": (
        f"{SECTION[0]}{kimi('functions.write:0', json.dumps(MARKED, indent=1))}{SECTION[1]}",
        [("call", "write", MARKED)],
    ),
    "words behind": (f"{SECTION[0]}{ROME}{SECTION[1]} So be it.", [MADE, ("text", " So be it.")]),
    "noise behind a call": (f"{SECTION[0]}{ROME} hm", [MADE, ("text", " hm")]),
    "cut off in a second call": (
        f'{SECTION[0]}{ROME}<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{"a',
        [MADE, ("text", '<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{"a')],
    ),
    "cut off in its name": (
        f"{SECTION[0]}<|tool_call_begin|>functi",
        [("text", f"{SECTION[0]}<|tool_call_begin|>functi")],
    ),
    "cut off in a mark": (f"Hm. {SECTION[0]}<|tool_cal", [("text", f"Hm. {SECTION[0]}<|tool_cal")]),
    "broken arguments": (
        f"Hm.\n{SECTION[0]}{kimi('functions.now:0', '{a}')}{SECTION[1]}",
        [("text", f"Hm.\n{SECTION[0]}{kimi('functions.now:0', '{a}')}{SECTION[1]}")],
    ),
    "nothing in it": (f"Hm. {SECTION[0]} {SECTION[1]}", [("text", f"Hm. {SECTION[0]} {SECTION[1]}")]),
    "a mention": (f"One writes {SECTION[0]} first.", [("text", f"One writes {SECTION[0]} first.")]),
}

GEMMA_CALL = '<|tool_call>call:weather{city:<|"|>Rome<|"|>,days:2}<tool_call|>'
GEMMA: dict[str, tuple[str, Heard]] = {
    "a call": (GEMMA_CALL, [MADE]),
    "words and two calls": (
        f"I look.\n{GEMMA_CALL}<|tool_call>call:now{{}}<tool_call|>",
        [("text", "I look."), MADE, ("call", "now", {})],
    ),
    "values": (
        (
            '<|tool_call>call:weather{city:<|"|>é "quoted", {a:1} <tool_call|>\n🌍<|"|>,exact:true,'
            'near:[<|"|>a<|"|>,<|"|><|"|>],'
            'place:{floors:-1.5,<|"|>a key<|"|>:null,deep:[[],{}]}}<tool_call|>'
        ),
        [
            (
                "call",
                "weather",
                {
                    "city": 'é "quoted", {a:1} <tool_call|>\n🌍',
                    "exact": True,
                    "near": ["a", ""],
                    "place": {"floors": -1.5, "a key": None, "deep": [[], {}]},
                },
            )
        ],
    ),
    "a number in a text's place": (
        "<|tool_call>call:weather{city:10}<tool_call|>",
        [("call", "weather", {"city": "10"})],
    ),
    "a text in a number's place": (
        '<|tool_call>call:weather{days:<|"|>2<|"|>}<tool_call|>',
        [("call", "weather", {"days": 2})],
    ),
    "cut off in a text": (GEMMA_CALL[:40], [("text", GEMMA_CALL[:40])]),
    "a text without quotes": (
        f"<|tool_call>call:weather{{city:Rome}}<tool_call|> {GEMMA_CALL}",
        [("text", "<|tool_call>call:weather{city:Rome}<tool_call|>"), MADE],
    ),
    "JSON of a strict function": (
        '<|tool_call>{"name": "write", "arguments": {"text": "<tool_call|>"}}<tool_call|>',
        [("call", "write", {"text": "<tool_call|>"})],
    ),
    "no closing brace": ("<|tool_call>call:now{<tool_call|>", [("text", "<|tool_call>call:now{<tool_call|>")]),
    "too deep": (
        f"<|tool_call>call:now{{a:{'[' * 99}{']' * 99}}}<tool_call|>",
        [("text", f"<|tool_call>call:now{{a:{'[' * 99}{']' * 99}}}<tool_call|>")],
    ),
    "a mention": ("Mark it <|tool_call> and <tool_call|>.", [("text", "Mark it <|tool_call> and <tool_call|>.")]),
}

PYTHON = '[weather(city="Rome", days=2)]'
LLAMA: dict[str, tuple[str, Heard]] = {
    "JSON": ('{"name": "weather", "parameters": {"city": "Rome", "days": 2}}', [MADE]),
    "JSON with a type": (
        '\n{ "type": "function", "name": "weather", "parameters": {"city": "Rome", "days": "2"} }',
        [("call", "weather", {"city": "Rome", "days": "2"})],
    ),
    "JSON twice": (
        '{"name": "weather", "parameters": {"city": "Rome", "days": 2}}{"name": "now", "parameters": {}}',
        [MADE, ("call", "now", {})],
    ),
    "JSON with a semicolon between": (
        '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}\n',
        [("call", "now", {}), ("call", "now", {})],
    ),
    "Python": (PYTHON, [MADE]),
    "Python twice": (" [weather(city='Rome', days='2'), now()]\n", [MADE, ("call", "now", {})]),
    "words": ("It is [weather(1)].", [("text", "It is [weather(1)].")]),
    "words with a call behind": (f"Sure: {PYTHON}", [("text", f"Sure: {PYTHON}")]),
    "words that begin as a call": ("[1] says so.", [("text", "[1] says so.")]),
    "a call of nothing that is there": ("[print(x=1)]", [("text", "[print(x=1)]")]),
    "JSON of nothing that is there": (
        '{"name": "Ann", "parameters": {}}',
        [("text", '{"name": "Ann", "parameters": {}}')],
    ),
    "JSON that is none": ('{"a": 1}', [("text", '{"a": 1}')]),
    "Python and words": (f"{PYTHON} as is.", [("text", f"{PYTHON} as is.")]),
    "JSON cut off": ('{"name": "weather", "param', [("text", '{"name": "weather", "param')]),
    "Python cut off": (PYTHON[:-4], [("text", PYTHON[:-4])]),
    "a value that is an expression": ("[weather(days=1+1)]", [("text", "[weather(days=1+1)]")]),
    "nothing": ("", []),
    "blanks": (" \n", [("text", " \n")]),
}

LFM_CALL = f"<|tool_call_start|>{PYTHON}<|tool_call_end|>"
LFM: dict[str, tuple[str, Heard]] = {
    "a call": (LFM_CALL, [MADE]),
    "a call and words": (f"{LFM_CALL}Checking Rome.", [MADE, ("text", "Checking Rome.")]),
    "two in a list": (
        "<|tool_call_start|>[weather(city='Rome', days=2), now()]<|tool_call_end|>",
        [MADE, ("call", "now", {})],
    ),
    "values": (
        (
            "<|tool_call_start|>[weather(city='it\\'s \"é\" \\u00fc\\n', near=['a', \"b\"], exact=True, "
            "place={\"floors\": 2, 'zip': None})]<|tool_call_end|>"
        ),
        [
            (
                "call",
                "weather",
                {
                    "city": 'it\'s "é" ü\n',
                    "near": ["a", "b"],
                    "exact": True,
                    "place": {"floors": 2, "zip": None},
                },
            )
        ],
    ),
    "an apostrophe, and lines": (
        "<|tool_call_start|>[write(text='It's Ann's\n\"way\", she said')]<|tool_call_end|>",
        [("call", "write", {"text": "It's Ann's\n\"way\", she said"})],
    ),
    "types of the schema": (
        "<|tool_call_start|>[weather(city=10, days='2')]<|tool_call_end|>",
        [("call", "weather", {"city": "10", "days": 2})],
    ),
    "JSON": (f"<|tool_call_start|>{LISTED}]<|tool_call_end|>", [MADE]),
    "JSON of a strict function": (
        '<|tool_call_start|>{"name": "write", "arguments": {"text": "<|tool_call_end|>"}}<|tool_call_end|>',
        [("call", "write", {"text": "<|tool_call_end|>"})],
    ),
    "values without names": (
        "<|tool_call_start|>[weather('Rome')]<|tool_call_end|>",
        [("text", "<|tool_call_start|>[weather('Rome')]<|tool_call_end|>")],
    ),
    "half a pair of surrogates": (
        "<|tool_call_start|>[write(text='\\ud83d')]<|tool_call_end|>",
        [("text", "<|tool_call_start|>[write(text='\\ud83d')]<|tool_call_end|>")],
    ),
    "cut off": (LFM_CALL[:40], [("text", LFM_CALL[:40])]),
    "no end, but whole": (LFM_CALL.removesuffix("<|tool_call_end|>"), [MADE]),
    "a mention": ("Mark it <|tool_call_start|>.", [("text", "Mark it <|tool_call_start|>.")]),
}

NS = "]<]minimax[>["


def element(name: str, inner: str) -> str:
    return f"{NS}<{name}>{inner}{NS}</{name}>"


def invoked(name: str, *elements: str) -> str:
    return f'{NS}<invoke name="{name}">' + "\n".join(elements) + f"{NS}</invoke>"


MINIMAX_CALL = f"{NS}<tool_call>\n{invoked('weather', element('city', 'Rome'), element('days', '2'))}\n{NS}</tool_call>"
MINIMAX: dict[str, tuple[str, Heard]] = {
    "a call": (MINIMAX_CALL, [MADE]),
    "words and two calls": (
        f"I look.\n\n{MINIMAX_CALL.replace(f'{NS}</tool_call>', invoked('now') + f'{NS}</tool_call>')}",
        [("text", "I look."), MADE, ("call", "now", {})],
    ),
    "values": (
        f"{NS}<tool_call>"
        + invoked(
            "weather",
            element("city", " 10 <b>é🌍</b>\n"),
            element("near", element("item", "Ostia") + element("item", "2")),
            element("place", "\n" + element("zip", "00100") + "\n" + element("floors", "3") + "\n"),
            element("more", element("a", element("b", "1"))),
        )
        + f"{NS}</tool_call>",
        [
            (
                "call",
                "weather",
                {
                    "city": " 10 <b>é🌍</b>\n",
                    "near": ["Ostia", "2"],
                    "place": {"zip": "00100", "floors": 3},
                    "more": {"a": {"b": "1"}},
                },
            )
        ],
    ),
    "nothing in a list or an object": (
        f"{NS}<tool_call>{invoked('weather', element('near', ''), element('place', ''))}{NS}</tool_call>",
        [("call", "weather", {"near": [], "place": {}})],
    ),
    "an element without an end": (
        f"{NS}<tool_call>{invoked('now', f'{NS}<a>1')}{NS}</tool_call>",
        [("text", f"{NS}<tool_call>{invoked('now', f'{NS}<a>1')}{NS}</tool_call>")],
    ),
    "words in it": (
        f"{NS}<tool_call>{invoked('now', 'hm')}{NS}</tool_call>",
        [("text", f"{NS}<tool_call>{invoked('now', 'hm')}{NS}</tool_call>")],
    ),
    "cut off before its end": (
        f'{NS}<tool_call>{NS}<invoke name="weather">{element("city", "Rome")}',
        [("text", f'{NS}<tool_call>{NS}<invoke name="weather">{element("city", "Rome")}')],
    ),
    "a mention": (f"Not {NS}<tool_call> but <tool_call>.", [("text", f"Not {NS}<tool_call> but <tool_call>.")]),
}

TWO = f'{LISTED}, {{"name": "now", "arguments": {{}}}}]'
GRANITE: dict[str, tuple[str, Heard]] = {
    "a list": (f"<|tool_call|>{LISTED}]", [MADE]),
    "a list of two, and words": (
        f"Let me see.\n<|tool_call|> {TWO}\n",
        [("text", "Let me see."), MADE, ("call", "now", {})],
    ),
    "a call that is in no list": (f"<|tool_call|>{LISTED[1:]}", [MADE]),
    "another mark": (f"<tool_call>{TWO}", [MADE, ("call", "now", {})]),
    "that mark, and its end": (f"<tool_call>\n{TWO}\n</tool_call> Hm.", [MADE, ("call", "now", {}), ("text", " Hm.")]),
    "words behind a list": (f"<tool_call>{LISTED}] Hm.", [MADE, ("text", " Hm.")]),
    "texts with brackets, quotes and marks": (
        r"""<|tool_call|>[{"name": "write", "arguments": {"text": "} \" ] <|tool_call|> \\"}}]""",
        [("call", "write", {"text": '} " ] <|tool_call|> \\'})],
    ),
    "a list that is cut off": (f"<|tool_call|>{LISTED}", [("text", f"<|tool_call|>{LISTED}")]),
    "a list of something else": ("<|tool_call|>[1] Hm.", [("text", "<|tool_call|>[1] Hm.")]),
    "an empty list": ("<|tool_call|>[]", [("text", "<|tool_call|>[]")]),
    "a mention": ("One writes <|tool_call|> first.", [("text", "One writes <|tool_call|> first.")]),
    "a mark at the end": ("So: <|tool_call|>", [("text", "So: <|tool_call|>")]),
}

APERTUS: dict[str, tuple[str, Heard]] = {
    "a call": ('<|tools_prefix|>[{"weather": {"city": "Rome", "days": 2}}]<|tools_suffix|>', [MADE]),
    "words and two calls": (
        'Let me see.<|tools_prefix|>[{"weather": {"city": "Rome", "days": 2}}, {"now": {}}]<|tools_suffix|>Hm.',
        [("text", "Let me see."), MADE, ("call", "now", {}), ("text", "Hm.")],
    ),
    "no end mark": ('<|tools_prefix|>[{"now": {}}]', [("call", "now", {})]),
    "an end mark that is cut off": (
        '<|tools_prefix|>[{"now": {}}]<|tools_',
        [("call", "now", {}), ("text", "<|tools_")],
    ),
    "two names in one": (
        '<|tools_prefix|>[{"now": {}, "write": {}}]<|tools_suffix|>',
        [("text", '<|tools_prefix|>[{"now": {}, "write": {}}]<|tools_suffix|>')],
    ),
    "arguments that are none": (
        '<|tools_prefix|>[{"now": 1}]<|tools_suffix|>',
        [("text", '<|tools_prefix|>[{"now": 1}]<|tools_suffix|>')],
    ),
}

V3 = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Rome", "days": 2}\n```<｜tool▁call▁end｜>'
V31 = '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome", "days": 2}<｜tool▁call▁end｜>'
CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
TICKS = {"text": "```\n<｜tool▁call▁end｜>```json"}
DEEPSEEK: dict[str, tuple[str, Heard]] = {
    "a call": (f"{CALLS[0]}{V31}{CALLS[1]}", [MADE]),
    "two fenced calls": (f"I look.\n\n{CALLS[0]}{V3}\n{V3}{CALLS[1]}", [("text", "I look."), MADE, MADE]),
    "two calls, and words": (
        f"{CALLS[0]}{V31}{V31.replace('weather', 'now')}{CALLS[1]}Hm.",
        [MADE, ("call", "now", MADE[2]), ("text", "Hm.")],
    ),
    "fences and marks in a text": (
        CALLS[0] + V31.replace("weather", "write").replace('{"city": "Rome", "days": 2}', json.dumps(TICKS)) + CALLS[1],
        [("call", "write", TICKS)],
    ),
    "a fence and fences in a text": (
        CALLS[0] + V3.replace("weather", "write").replace('{"city": "Rome", "days": 2}', json.dumps(TICKS)) + CALLS[1],
        [("call", "write", TICKS)],
    ),
    "cut off": (f"{CALLS[0]}{V31[:-30]}", [("text", f"{CALLS[0]}{V31[:-30]}")]),
    "a fence that is cut off": (f"{CALLS[0]}{V3[:-22]}", [("text", f"{CALLS[0]}{V3[:-22]}")]),
    "no separator": (
        f"{CALLS[0]}<｜tool▁call▁begin｜>now{{}}<｜tool▁call▁end｜>{CALLS[1]}",
        [("text", f"{CALLS[0]}<｜tool▁call▁begin｜>now{{}}<｜tool▁call▁end｜>{CALLS[1]}")],
    ),
    "a mention": (f"One writes {CALLS[0]} first.", [("text", f"One writes {CALLS[0]} first.")]),
}

HUNYUAN: dict[str, tuple[str, Heard]] = {
    "a list": (f"<tool_calls>{TWO}</tool_calls>", [MADE, ("call", "now", {})]),
    "lines, and words": (
        f"Let me see.\n<tool_calls>\n{LISTED}\n]\n</tool_calls> Hm.",
        [("text", "Let me see."), MADE, ("text", " Hm.")],
    ),
    "an empty list": ("<tool_calls>[]</tool_calls>", [("text", "<tool_calls>[]</tool_calls>")]),
    "cut off": (f"<tool_calls>{LISTED}", [("text", f"<tool_calls>{LISTED}")]),
    "a mention": ("One writes <tool_calls> first.", [("text", "One writes <tool_calls> first.")]),
}

PHI: dict[str, tuple[str, Heard]] = {
    "a list": (f"functools{TWO}", [MADE, ("call", "now", {})]),
    "words around": (f"Let me see. functools {LISTED}] Hm.", [("text", "Let me see."), MADE, ("text", " Hm.")]),
    "a module of that name": (
        "from functools import partial, functools[0]",
        [("text", "from functools import partial, functools[0]")],
    ),
    "cut off": (f"functools{LISTED}", [("text", f"functools{LISTED}")]),
}

ACTION = "<|action_start|><|plugin|>"
INTERNLM: dict[str, tuple[str, Heard]] = {
    "a call": (f'{ACTION}{{"name": "weather", "parameters": {{"city": "Rome", "days": 2}}}}<|action_end|>', [MADE]),
    "words, and a line": (
        f'Let me see.{ACTION}\n{{"name": "now", "parameters": {{}}}}<|action_end|>\n',
        [("text", "Let me see."), ("call", "now", {})],
    ),
    "code to run": (
        "<|action_start|><|interpreter|>\n1 + 1<|action_end|>",
        [("text", "<|action_start|><|interpreter|>\n1 + 1<|action_end|>")],
    ),
    "cut off": (f'{ACTION}{{"name": "now"', [("text", f'{ACTION}{{"name": "now"')]),
}

FAMILIES = {
    ToolFormat.DEEPSEEK: DEEPSEEK,
    ToolFormat.HUNYUAN: HUNYUAN,
    ToolFormat.PHI: PHI,
    ToolFormat.INTERNLM: INTERNLM,
    ToolFormat.GRANITE: GRANITE,
    ToolFormat.APERTUS: APERTUS,
    ToolFormat.GLM: GLM,
    ToolFormat.MISTRAL: MISTRAL,
    ToolFormat.KIMI: KIMI,
    ToolFormat.GEMMA: GEMMA,
    ToolFormat.LLAMA: LLAMA,
    ToolFormat.LFM: LFM,
    ToolFormat.MINIMAX: MINIMAX,
}
CASES = [(form, name) for form, cases in FAMILIES.items() for name in cases]


@pytest.mark.parametrize(("form", "name"), CASES, ids=lambda value: getattr(value, "name", value))
def test_a_familys_text_is_taken_apart_wherever_it_is_cut(form: ToolFormat, name: str) -> None:
    text, expected = FAMILIES[form][name]
    assert heard(text, form, functions=FUNCTIONS) == expected
    for cut in range(len(text) + 1):
        assert heard(text, form, [cut], functions=FUNCTIONS) == expected, cut
    assert heard(text, form, list(range(len(text))), functions=FUNCTIONS) == expected


FIRST_OF_TWO = {
    ToolFormat.DEEPSEEK: (f"So: {CALLS[0]}{V31}", "<｜tool▁call▁begin｜>f"),
    ToolFormat.HUNYUAN: (f"So: <tool_calls>{LISTED}]</tool_calls>", "\n<tool_calls>["),
    ToolFormat.PHI: (f"So: functools{LISTED}]", "\nfunctools["),
    ToolFormat.INTERNLM: (f"So: {ACTION}{LISTED[1:]}<|action_end|>", f"\n{ACTION}{{"),
    ToolFormat.GRANITE: (f"So: <|tool_call|>{LISTED}]", "\n<|tool_call|>["),
    ToolFormat.APERTUS: (
        'So: <|tools_prefix|>[{"weather": {"city": "Rome", "days": 2}}]<|tools_suffix|>',
        "<|tools_prefix|>[{",
    ),
    ToolFormat.GLM: (f"So: {GLM_CALL}", "\n<tool_call>"),
    ToolFormat.MISTRAL: (f"So: {NAMED}", "[TOOL_CALLS]no"),
    ToolFormat.KIMI: (f"So: {SECTION[0]}{ROME}", "<|tool_call_begin|>f"),
    ToolFormat.GEMMA: (f"So: {GEMMA_CALL}", "<|tool_call>call:"),
    ToolFormat.LFM: (f"So: {LFM_CALL}", "<|tool_call_start|>["),
    ToolFormat.MINIMAX: (f"So: {MINIMAX_CALL[: MINIMAX_CALL.rindex(NS)].rstrip()}", f"\n{NS}"),
}


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


BITS = st.sampled_from(
    [
        *(
            '{"name": "now", "arguments": {}}',
            '"',
            "'",
            "\\",
            "{",
            "}",
            "[",
            "]",
            "(",
            ")",
            ",",
            ":",
            "<",
            " ",
            "\n",
            "x",
        ),
        *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "now"),
        *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", *SECTION, ROME, "<|tool_call_begin|>", "<|tool_call_end|>"),
        *(*CALLS, V3, V31, "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "```json", "```"),
        *("<tool_calls>", "</tool_calls>", "functools", ACTION, "<|action_end|>"),
        *("<|tool_call|>", "<|tools_prefix|>", "<|tools_suffix|>", '[{"now": {}}]'),
        *("<|tool_call>", "call:now{", '<|"|>', "<tool_call|>", "<|tool_call_start|>", "now(", "text=", "[now()]"),
        *(
            f"{NS}<tool_call>",
            f'{NS}<invoke name="now">',
            f"{NS}<a>",
            f"{NS}</a>",
            f"{NS}</invoke>",
            f"{NS}</tool_call>",
        ),
    ]
)


@given(st.lists(BITS, max_size=14), st.lists(st.integers(0, 300), max_size=6), st.sampled_from(list(FAMILIES)))
def test_nothing_breaks_and_no_cut_matters(bits: list[str], cuts: list[int], form: ToolFormat) -> None:
    text = "".join(bits)
    places = [min(cut, len(text)) for cut in cuts]
    found = heard(text, form, functions=FUNCTIONS)
    assert heard(text, form, places, functions=FUNCTIONS) == found
    if not any(kind == "call" for kind, *_ in found):
        assert found == ([("text", text)] if text else [])


LONG = 'print("</tool_call> it\'s }")\n' * 2000
AT_LENGTH = {
    ToolFormat.DEEPSEEK: (
        f"{CALLS[0]}<｜tool▁call▁begin｜>write<｜tool▁sep｜>{json.dumps({'text': LONG})}<｜tool▁call▁end｜>{CALLS[1]}"
    ),
    ToolFormat.HUNYUAN: f"<tool_calls>[{json.dumps({'name': 'write', 'arguments': {'text': LONG}})}]</tool_calls>",
    ToolFormat.PHI: f"functools[{json.dumps({'name': 'write', 'arguments': {'text': LONG}})}]",
    ToolFormat.INTERNLM: f"{ACTION}{json.dumps({'name': 'write', 'parameters': {'text': LONG}})}<|action_end|>",
    ToolFormat.GRANITE: f"<|tool_call|>[{json.dumps({'name': 'write', 'arguments': {'text': LONG}})}]",
    ToolFormat.APERTUS: f"<|tools_prefix|>[{json.dumps({'write': {'text': LONG}})}]<|tools_suffix|>",
    ToolFormat.GLM: f"<tool_call>write<arg_key>text</arg_key><arg_value>{LONG}</arg_value></tool_call>",
    ToolFormat.XML: f"<tool_call><function=write><parameter=text>{LONG}\n</parameter></function></tool_call>",
    ToolFormat.MISTRAL: f"[TOOL_CALLS]write[ARGS]{json.dumps({'text': LONG})}",
    ToolFormat.KIMI: f"{SECTION[0]}{kimi('functions.write:0', json.dumps({'text': LONG}))}{SECTION[1]}",
    ToolFormat.GEMMA: f'<|tool_call>call:write{{text:<|"|>{LONG}<|"|>}}<tool_call|>',
    ToolFormat.LLAMA: f"[write(text={json.dumps(LONG)})]",
    ToolFormat.LFM: f"<|tool_call_start|>[write(text={json.dumps(LONG)})]<|tool_call_end|>",
    ToolFormat.MINIMAX: f"{NS}<tool_call>{invoked('write', element('text', LONG))}{NS}</tool_call>",
}


@pytest.mark.parametrize("form", AT_LENGTH, ids=lambda form: form.name)
def test_a_long_call_is_read_once(form: ToolFormat) -> None:
    """Read anew with each piece, it would take hours."""
    text = AT_LENGTH[form]
    assert heard(text, form, list(range(0, len(text), 7)), functions=FUNCTIONS) == [("call", "write", {"text": LONG})]


@pytest.mark.parametrize(
    ("begin", "end", "text"),
    [
        ("[THINK]", "[/THINK]", f"[THINK]Hm. <think> [TOOL_CALLS][/THINK]{NAMED}"),
        ("<|channel>thought", "<channel|>", f"<|channel>thought\nHm. <think> [TOOL_CALLS]\n<channel|>{NAMED}"),
        ("<mm:think>", "</mm:think>", f"\n<mm:think>\nHm. <think> [TOOL_CALLS]</mm:think>\n\n{NAMED}"),
    ],
)
def test_reasoning_stands_between_the_marks_that_the_service_tells(begin: str, end: str, text: str) -> None:
    for cut in range(len(text)):
        parser = OutputParser(ToolFormat.MISTRAL, FUNCTIONS)
        parser.begin(v1.GenerateStarted(reasoning_begin=begin, reasoning_end=end))
        pieces = [*parser.feed(text[:cut]), *parser.feed(text[cut:]), *parser.end()]
        assert whole(pieces) == [("reasoning", "Hm. <think> [TOOL_CALLS]"), MADE], cut


@pytest.mark.parametrize(
    ("form", "marks", "call", "rest"),
    [
        (ToolFormat.KIMI, ("", ""), f"{SECTION[0]}{ROME}{SECTION[1]}", [MADE]),
        (ToolFormat.GEMMA, ("<|channel>thought", "<channel|>"), GEMMA_CALL, [MADE]),
    ],
    ids=["KIMI", "GEMMA"],
)
def test_the_mark_of_a_call_ends_reasoning_that_the_model_has_not_ended(
    form: ToolFormat, marks: tuple[str, str], call: str, rest: Heard
) -> None:
    text = f"Hm. <|tool\n {call}"
    for cut in range(len(text)):
        parser = OutputParser(form, FUNCTIONS)
        parser.begin(v1.GenerateStarted(thinking=True, reasoning_begin=marks[0], reasoning_end=marks[1]))
        pieces = [*parser.feed(text[:cut]), *parser.feed(text[cut:]), *parser.end()]
        assert whole(pieces) == [("reasoning", "Hm. <|tool"), *rest], cut


def test_a_whole_call_of_glms_ends_reasoning_and_a_mention_does_not() -> None:
    said = f"I write <tool_call> now. {GLM_CALL.replace('weather', 'other')} {GLM_CALL}"
    thought = said.removesuffix(f" {GLM_CALL}")
    for cut in range(len(said)):
        assert heard(said, ToolFormat.GLM, [cut], thinking=True, functions=FUNCTIONS) == [("reasoning", thought), MADE]
