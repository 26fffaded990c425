"""What it takes to take an answer apart grows with its length and no faster, whatever a model repeats in it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import BuiltinMethodType, FrameType
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import output_parser
from gateway.output_parser import CallStart, OutputParser, ReasoningDelta, TextDelta
from gateway.tool_parsers.registry import TOOL_PARSERS
from gateway.tool_parsers.tool_format import ToolFormat
from gateway.tool_parsers.tool_parser import Functions, Reader, Stretch, ToolParser
from tests.unit.gateway.test_tool_parsers import ACTION, BITS, CALLS, FUNCTIONS, NS, SECTION
from twinlens import v1

SCANS: Final = {"strip", "lstrip", "rstrip", "partition", "rpartition", "split", "replace"}
"""Methods of a text that look at all of it."""

LENGTH: Final = 4096
"""Of a short answer; several times what is looked at together."""


class Work:
    """Steps of Python, calls of what is compiled, characters that such methods look at, and those that readers are
    given: a reader looks at each once."""

    def __init__(self) -> None:
        self.done = 0

    def count(self, _: FrameType, kind: str, what: Any) -> None:
        """Called by Python itself."""
        self.done += 1
        if kind == "c_call" and isinstance(what, BuiltinMethodType) and isinstance(what.__self__, str):
            self.done += len(what.__self__) if what.__name__ in SCANS else 0

    def counted(self, make: Callable[[Functions], Reader]) -> Callable[[Functions], Reader]:
        """The same reader, whose texts are counted."""

        class Counted:
            def __init__(self, functions: Functions) -> None:
                self._reader = make(functions)
                self._seen = 0

            def read(inner, text: str, *, last: bool) -> Stretch | None:  # noqa: N805
                self.done += max(0, len(text) - inner._seen)
                inner._seen = max(inner._seen, len(text))
                return inner._reader.read(text, last=last)

        return Counted

    def parsers(self) -> Mapping[ToolFormat, ToolParser]:
        """All of them, counted."""
        return {
            form: replace(
                parser,
                reader=self.counted(parser.reader),
                bare=(parser.bare[0], self.counted(parser.bare[1])) if parser.bare else None,
            )
            for form, parser in TOOL_PARSERS.items()
        }


def work(form: ToolFormat, text: str, size: int) -> int:
    """What it takes to take this apart, in pieces of this size."""
    counted = Work()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_parser, "TOOL_PARSERS", counted.parsers())
        parser = OutputParser(form, FUNCTIONS, streams=True)
        parser.begin(v1.GenerateStarted())
        before = sys.getprofile()
        sys.setprofile(counted.count)
        try:
            for begin in range(0, len(text), size):
                parser.feed(text[begin : begin + size])
            parser.end()
        finally:
            sys.setprofile(before)
    return counted.done


def grows_no_faster(form: ToolFormat, head: str, unit: str, tail: str, size: int, length: int) -> None:
    once, twice = (work(form, head + unit * (times * length // len(unit)) + tail, size) for times in (1, 2))
    assert twice <= 2.3 * once + 1000, (once, twice)


J, X, K, D = ToolFormat.JSON, ToolFormat.XML, ToolFormat.KIMI, ToolFormat.DEEPSEEK
DEEPSEEK_BEGIN = "<｜tool▁call▁begin｜>"
CASES = {
    "escaped quotes": (J, "", '<tool_call>{"a":\\"</tool_call>'),
    "escaped quotes on lines": (J, "", '<tool_call>\n{\\"name\\": \\"now\\", \\"arguments\\": {}}\n</tool_call>\n'),
    "calls that are open": (J, "", '<tool_call>{"'),
    "calls that are open, in reasoning": (J, "<think>", '<tool_call>{"a</tool_call>'),
    "names twice": (J, "", '<tool_call>{"a": 1, "a": 2}</tool_call>'),
    "open lists": (J, '<tool_call>{"name": "now", "arguments": {"a": ', "["),
    "half a text": (J, '<tool_call>{"name": "now", "arguments": {"a": "', "x"),
    "mentions": (J, "", "<tool_call> "),
    "blanks": (J, "", " "),
    "line ends": (J, "x", "\n"),
    "line ends in reasoning": (J, "<think>x", "\n"),
    "blanks in a call": (J, "<tool_call>", " "),
    "parameters without an end": (X, "", "<tool_call>\n<function=now>\n<parameter=a>\nx\n</function>\n</tool_call>\n"),
    "the same without marks": (X, "", "<function=now>\n<parameter=a>\nx\n</function>\n"),
    "ends behind the ends": (X, "", "<tool_call><function=now><parameter=a></tool_call></parameter>"),
    "the same in reasoning": (X, "<think>", "<tool_call><function=now><parameter=a></tool_call></parameter>"),
    "ends in a value": (X, "<tool_call><function=now><parameter=a>", "</parameter>x"),
    "values without an end": (ToolFormat.GLM, "", "<tool_call>now<arg_key>a</arg_key><arg_value></tool_call>"),
    "blanks behind a name": (ToolFormat.GLM, "<tool_call>now", " "),
    "names of Mistral's": (ToolFormat.MISTRAL, "", "[TOOL_CALLS]"),
    "lists of Mistral's": (ToolFormat.MISTRAL, "", '[TOOL_CALLS][{\\"name\\": \\"now\\"}]'),
    "quotes before JSON": (K, SECTION[0], '<|tool_call_begin|>"<|tool_call_end|>'),
    "escaped quotes of Kimi's": (K, "", f'{SECTION[0]}<|tool_call_begin|>now:0{{\\"a\\": 1}}<|tool_call_end|>'),
    "blanks in a section": (K, SECTION[0], " "),
    "half a text of Gemma's": (ToolFormat.GEMMA, "", '<|tool_call>call:now{a:<|"|><tool_call|>'),
    "objects": (ToolFormat.LLAMA, "", '{"name":"now","parameters":{}}'),
    "quotes": (ToolFormat.LLAMA, "[now(a=", '" '),
    "half a list of LFM's": (ToolFormat.LFM, "", '<|tool_call_start|>{"<|tool_call_end|>'),
    "elements": (ToolFormat.MINIMAX, "", f'{NS}<tool_call>{NS}<invoke name="now">{NS}<a>'),
    "lists of Granite's": (ToolFormat.GRANITE, "", '<|tool_call|>[{"'),
    "lists of Apertus'": (ToolFormat.APERTUS, "", '<|tools_prefix|>["'),
    "blanks in a fence": (D, f"{CALLS[0]}{DEEPSEEK_BEGIN}function<｜tool▁sep｜>now```json", " "),
    "fences": (D, f"{CALLS[0]}{DEEPSEEK_BEGIN}function<｜tool▁sep｜>now```json", "```"),
    "half a text of DeepSeek's": (D, "", f'{CALLS[0]}{DEEPSEEK_BEGIN}now<｜tool▁sep｜>{{"<｜tool▁call▁end｜>'),
    "lists of Hunyuan's": (ToolFormat.HUNYUAN, "", '<tool_calls>["'),
    "lists of Phi's": (ToolFormat.PHI, "", 'functools["'),
    "half a text of InternLM's": (ToolFormat.INTERNLM, "", ACTION + '{"<|action_end|>'),
    "calls that had to be": (ToolFormat.LIST, "[", '{"name": "now", "parameters": {}},'),
    "half a list that had to be": (ToolFormat.LIST, '[{"name": "now", "parameters": {"a": "', "x"),
    "lists that are none": (ToolFormat.LIST, "", '[{"a"]'),
}


def test_no_form_is_left_out() -> None:
    assert {form for form, *_ in CASES.values()} == set(TOOL_PARSERS)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [16, 1_000_000], ids=["pieces", "whole"])
def test_an_answer_twice_as_long_takes_twice_the_work(name: str, size: int) -> None:
    grows_no_faster(*CASES[name], "", size, LENGTH)


@given(
    st.sampled_from(list(TOOL_PARSERS)),
    st.lists(BITS, max_size=3),
    st.lists(BITS, min_size=1, max_size=6),
    st.lists(BITS, max_size=2),
)
def test_nothing_that_is_repeated_takes_more(
    form: ToolFormat, head: list[str], unit: list[str], tail: list[str]
) -> None:
    grows_no_faster(form, "".join(head), "".join(unit), "".join(tail), 256, LENGTH)


@pytest.mark.parametrize("opened", ["```json", "```json{", "```json\n{}", ""])
def test_a_call_of_deepseeks_is_read_once_though_its_fence_has_no_end(opened: str) -> None:
    """Tried with each of its blanks as the end, it would take hours."""
    text = f"{CALLS[0]}{DEEPSEEK_BEGIN}function<｜tool▁sep｜>now{opened}{' ' * 1_000_000}<｜tool▁call▁end｜>"
    parser = OutputParser(D, FUNCTIONS)
    pieces = [*parser.feed(text), *parser.end()]
    assert "".join(piece.text for piece in pieces if isinstance(piece, TextDelta)) == text


LOOPS = {
    J: '<tool_call>\n{\\"name\\": \\"now\\", \\"arguments\\": {}}\n</tool_call>',
    K: f'{SECTION[0]}<|tool_call_begin|>now:0<|tool_call_argument_begin|>{{\\"a\\": 1}}<|tool_call_end|>{SECTION[1]}',
    D: f'{CALLS[0]}{DEEPSEEK_BEGIN}now<｜tool▁sep｜>{{\\"a\\": 1}}<｜tool▁call▁end｜>{CALLS[1]}',
    ToolFormat.INTERNLM: f'{ACTION}{{\\"name\\": \\"now\\"}}<|action_end|>',
    ToolFormat.LFM: '<|tool_call_start|>{\\"name\\": \\"now\\"}<|tool_call_end|>',
    ToolFormat.MISTRAL: '[TOOL_CALLS]now[ARGS]{\\"a\\": 1}',
    ToolFormat.GRANITE: '<|tool_call|>[{\\"name\\": \\"now\\"}]',
    ToolFormat.HUNYUAN: '<tool_calls>[{\\"name\\": \\"now\\"}]</tool_calls>',
    ToolFormat.APERTUS: '<|tools_prefix|>[{\\"now\\": 1}]<|tools_suffix|>',
    ToolFormat.PHI: 'functools[{\\"name\\": \\"now\\"}]',
}
GOOD = {
    J: '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    K: f"{SECTION[0]}<|tool_call_begin|>now:0<|tool_call_argument_begin|>{{}}<|tool_call_end|>{SECTION[1]}",
    D: f"{CALLS[0]}{DEEPSEEK_BEGIN}now<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>{CALLS[1]}",
    ToolFormat.INTERNLM: f'{ACTION}{{"name": "now", "arguments": {{}}}}<|action_end|>',
    ToolFormat.LFM: "<|tool_call_start|>[now()]<|tool_call_end|>",
    ToolFormat.MISTRAL: "[TOOL_CALLS]now[ARGS]{}",
    ToolFormat.GRANITE: '<|tool_call|>[{"name": "now", "arguments": {}}]',
    ToolFormat.HUNYUAN: '<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>',
    ToolFormat.APERTUS: '<|tools_prefix|>[{"now": {}}]<|tools_suffix|>',
    ToolFormat.PHI: 'functools[{"name": "now", "arguments": {}}]',
}


@pytest.mark.parametrize("form", LOOPS)
def test_malformed_calls_are_words_as_they_come_and_a_good_one_behind_them_is_called(form: ToolFormat) -> None:
    parser = OutputParser(form, FUNCTIONS, streams=True)
    for _ in range(100):
        told = parser.feed(LOOPS[form])
        assert "".join(piece.text for piece in told if isinstance(piece, TextDelta)) == LOOPS[form]
    assert parser.feed(GOOD[form])[0] == CallStart("now")
    parser.end()
    assert parser.calls == 1


@pytest.mark.parametrize("thinking", [False, True])
def test_of_many_calls_without_an_end_the_last_ones_are_not_looked_for(thinking: bool) -> None:
    """Each takes all that follows to be looked at once more."""
    opened = "<tool_call><function=now><parameter=a></tool_call>"
    call = "<tool_call><function=now></function></tool_call>"
    kind = ReasoningDelta if thinking else TextDelta
    for count, calls in ((3, 1), (100, 0)):
        for size in (1, 100, 100_000):
            text = opened * count + call
            parser = OutputParser(X, FUNCTIONS)
            parser.begin(v1.GenerateStarted(thinking=thinking))
            pieces = [each for at in range(0, len(text), size) for each in parser.feed(text[at : at + size])]
            pieces += parser.end()
            said = "".join(piece.text for piece in pieces if isinstance(piece, kind))
            assert (parser.calls, said) == (calls, opened * count + ("" if calls else call))
