"""Arguments of a call that was begun and is none, or is cut off, end in streams with a bracket that closes nothing:
some clients close what is open, and would run the function with what there is."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api import chat, responses_output
from gateway.api.responses_request import ResponsesRequest
from gateway.chat_answers import ChoiceEnd, taken_apart
from gateway.output_parser import ArgumentsDelta, CallLeftOpen, CallStart, OutputParser, Piece, TextDelta
from gateway.tool_parsers.json_end import NO_JSON, JsonEnd, broken_end
from gateway.tool_parsers.tool_format import ToolFormat
from tests.unit.gateway.test_begun_calls import OBJECTS
from tests.unit.gateway.test_call_streams import message, response
from tests.unit.gateway.test_chat_streams import events
from tests.unit.gateway.test_tool_parsers import FUNCTIONS
from twinlens import v1

MALFORMED = {
    '{"city": "Rome", "near": ["a"': "}",
    '{"city": "rm -rf /tmp/': '"]',
    '{"place": {"zip": 1}': "]",
    '{"city": "a\\n': '"]',
    "{": "]",
}


def said(arguments: str) -> str:
    return f'So: <tool_call>{{"name": "weather", "arguments": {arguments}'


@given(OBJECTS, st.booleans(), st.integers(0, 200))
def test_nothing_that_follows_makes_it_json(value: dict[str, Any], ascii_alone: bool, cut: int) -> None:
    whole = json.dumps(value, ensure_ascii=ascii_alone)
    begun = whole[: 1 + cut % (len(whole) - 1)]
    broken = begun + broken_end(begun)
    assert JsonEnd().find(broken) == NO_JSON


def streamed(text: str) -> list[dict[str, Any]]:
    """The chunks of a chat."""
    parser = partial(OutputParser, ToolFormat.JSON, FUNCTIONS, streams=True)
    asked = chat._Asked(
        head={"id": "x"},
        n=1,
        with_logprobs=False,
        as_ids=False,
        with_ids=False,
        with_uuids=False,
        prompt_logprobs=None,
        with_usage=False,
        with_usage_so_far=False,
        with_timings=False,
        shows_reasoning=True,
    )

    async def told() -> bytes:
        return b"".join([part async for part in chat._chunks(taken_apart(events([text], 3), parser, 1), asked)])

    lines = asyncio.run(told()).decode().split("\n\n")
    return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]


@pytest.mark.parametrize("arguments", MALFORMED)
def test_arguments_of_a_chat_end_with_its_reason(arguments: str) -> None:
    *before, last = streamed(said(arguments))
    deltas = [call for each in before for call in each["delta"].get("tool_calls", [])]
    assert "".join(call["function"]["arguments"] for call in deltas) == arguments
    assert last["finish_reason"] == "stop"
    assert last["delta"] == {"tool_calls": [{"index": 0, "function": {"arguments": MALFORMED[arguments]}}]}
    assert "".join(each["delta"].get("content", "") for each in before) == said(arguments)


def test_each_call_of_a_chat_that_is_left_open_ends_so_and_no_other() -> None:
    good = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    text = "".join((said('{"city": [}}</tool_call>'), good, said('{"city": 1 2}}</tool_call>')))
    last = streamed(text)[-1]
    ends = [(call["index"], call["function"]["arguments"]) for call in last["delta"]["tool_calls"]]
    assert (ends, last["finish_reason"]) == ([(0, "}"), (2, "]")], "tool_calls")
    assert streamed(good)[-1]["delta"] == {}


@pytest.mark.parametrize("arguments", MALFORMED)
def test_arguments_of_a_response_end_so_and_those_of_a_message_stay_open(arguments: str) -> None:
    told, ended = response(said(arguments), ToolFormat.JSON, 3, streams=True)
    assert told == ended
    assert told[1] == ("function_call", "weather", arguments + MALFORMED[arguments])
    told, ended = message(said(arguments), ToolFormat.JSON, 3, streams=True)
    assert told == ended
    assert told[1] == ("tool_use", "weather", arguments)


@pytest.mark.parametrize(
    ("arguments", "end"),
    [('{"city": "Ro', '"]'), ('{"near": ["C:\\', '\\"}'), ('{"days": 1', "]"), ('{"city": "Rome"}', "")],
)
def test_a_call_that_had_to_be_made_and_is_cut_off_is_one_that_ends_so(arguments: str, end: str) -> None:
    parser = OutputParser(ToolFormat.ARGUMENTS, {"weather": {}}, streams=True)
    choice = chat._Choice(shows_reasoning=True)
    choice.add([*parser.feed(arguments), *parser.end(cut=True)])
    told = [call["function"]["arguments"] for call in choice.last_delta().get("tool_calls", [])]
    assert (parser.calls, choice.words, told) == (1, [], [end] if end else [])
    assert choice.calls[0]["function"]["arguments"] == arguments
    parser = OutputParser(ToolFormat.ARGUMENTS, {"weather": {}})
    parser.feed(arguments)
    left_open = [CallLeftOpen()] if end else []
    assert parser.end(cut=True) == [CallStart("weather"), ArgumentsDelta(arguments), *left_open]


CALL = '{"name": "weather", "parameters": {"city": "Rome"}}'
WHOLE = [CallStart("weather"), ArgumentsDelta('{"city": "Rome"}')]


@pytest.mark.parametrize(
    ("rest", "behind"),
    [
        ("]", []),
        (" ", []),
        (', {"na', [TextDelta(', {"na')]),
        (', {"name": "now", "parameters": {', [CallStart("now"), ArgumentsDelta("{"), CallLeftOpen()]),
        (', {"name": "now", "parameters": {"a": 12', [CallStart("now"), ArgumentsDelta('{"a": '), CallLeftOpen()]),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_calls_of_a_list_that_is_cut_off_are_calls_and_the_last_is_left_open(
    rest: str, behind: list[Piece], streams: bool
) -> None:
    text = f"[{CALL}{rest}"
    for size in (1, 7, len(text)):
        parser = OutputParser(ToolFormat.LIST, FUNCTIONS, streams=streams)
        pieces = [piece for at in range(0, len(text), size) for piece in parser.feed(text[at : at + size])]
        assert joined([*pieces, *parser.end(cut=True)]) == [*WHOLE, *behind]


def joined(pieces: list[Piece]) -> list[Piece]:
    """The same, arguments in one piece."""
    out: list[Piece] = []
    for piece in pieces:
        if out and isinstance(piece, ArgumentsDelta) and isinstance(last := out[-1], ArgumentsDelta):
            out[-1] = ArgumentsDelta(last.text + piece.text)
        else:
            out.append(piece)
    return out


@pytest.mark.parametrize("cut", [True, False])
def test_only_a_call_that_is_left_open_makes_an_item_of_a_response_incomplete(cut: bool) -> None:
    parser = OutputParser(ToolFormat.LIST, FUNCTIONS)
    pieces = parser.feed(f"[{CALL}" + (', {"name": "now", "parameters": {"a' if cut else ""))
    pieces += parser.end(cut=True)
    finished = v1.GenerateFinished(reason=v1.FINISH_REASON_LENGTH)
    output = responses_output.Output(ResponsesRequest(input="x"), "id", "demo")
    told = list(output.add(ChoiceEnd(pieces, parser.calls, finished)))
    states = [item["status"] for item in output.response()["output"]]
    assert states == ["completed", "incomplete"][: 1 + cut]
    assert [each["item"]["status"] for each in told if each["type"] == "response.output_item.done"] == states
    assert output.response()["status"] == "incomplete"
