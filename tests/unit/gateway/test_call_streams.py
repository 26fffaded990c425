"""What streams of responses and of messages tell, put together, is the whole answer, of every form of calls: but for
calls that were begun and are none, which are left open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial

import pytest

from gateway.api import messages_output, responses_output
from gateway.api.responses_request import ResponsesRequest
from gateway.chat_answers import ChatEvent, taken_apart
from gateway.output_parser import OutputParser
from gateway.tool_parsers.arguments import parsed
from gateway.tool_parsers.tool_format import ToolFormat
from tests.unit.gateway.test_chat_streams import TEXTS
from tests.unit.gateway.test_tool_parsers import FUNCTIONS
from twinlens import v1

Said = list[tuple[str, str, str]]
"""Words, thoughts and calls in order: the kind, a function's name, and the text."""


def answer_of(text: str, form: ToolFormat, size: int, *, streams: bool) -> list[ChatEvent]:
    """The events of an answer that comes in pieces of this size."""

    async def events() -> AsyncGenerator[v1.GenerateResponse]:
        yield v1.GenerateResponse(started=v1.GenerateStarted())
        for begin in range(0, len(text), size):
            yield v1.GenerateResponse(delta=v1.GenerateDelta(text=text[begin : begin + size]))
        yield v1.GenerateResponse(finished=v1.GenerateFinished(reason=v1.FINISH_REASON_STOP))

    async def taken() -> list[ChatEvent]:
        return [each async for each in taken_apart(events(), partial(OutputParser, form, FUNCTIONS, streams=streams))]

    return asyncio.run(taken())


def response(text: str, form: ToolFormat, size: int, *, streams: bool) -> tuple[Said, Said]:
    """What the events of a response tell, and what it is at its end."""
    output = responses_output.Output(ResponsesRequest(input="x"), "id", "demo")
    events = [each for said in answer_of(text, form, size, streams=streams) for each in output.add(said)]
    told: dict[int, list[str]] = {}
    for each in events:
        if each["type"] == "response.output_item.added":
            told[each["output_index"]] = [each["item"]["type"], each["item"].get("name", ""), ""]
        elif each["type"].endswith(".delta"):
            told[each["output_index"]][2] += each["delta"]
    ended = [
        (item["type"], item.get("name", ""), item["arguments"] if "arguments" in item else item["content"][0]["text"])
        for item in output.response()["output"]
    ]
    opened = [item for item in output.response()["output"] if item["status"] == "incomplete"]
    assert all(item["type"] == "function_call" and parsed(item["arguments"]) is None for item in opened)
    return [(kind, name, said) for kind, name, said in told.values()], ended


def message(text: str, form: ToolFormat, size: int, *, streams: bool) -> tuple[Said, Said]:
    """What the events of a message tell, and what its blocks are at its end."""
    answer = messages_output.Answer("id", "demo", 99, lambda _: False, FUNCTIONS if streams else ())
    events = [each for said in answer_of(text, form, size, streams=streams) for each in answer.add(said)]
    told: list[list[str]] = []
    for each in events:
        if each["type"] == "content_block_start":
            told.append([each["content_block"]["type"], each["content_block"].get("name", ""), ""])
        elif each["type"] == "content_block_delta" and each["delta"]["type"] != "signature_delta":
            told[each["index"]][2] += next(each["delta"][part] for part in _PARTS if part in each["delta"])
    called = any(kind == "tool_use" and parsed(said) is not None for kind, _, said in told)
    assert events[-2]["delta"]["stop_reason"] == ("tool_use" if called else "end_turn")
    blocks = [(block.head["type"], block.head.get("name", ""), "".join(block.pieces)) for block in answer._blocks]
    return [(kind, name, said) for kind, name, said in told], blocks


_PARTS = ("text", "thinking", "partial_json")


def complete(said: Said) -> Said:
    """The same without calls that were begun and are none."""
    found: Said = []
    for kind, name, text in said:
        if kind in ("function_call", "tool_use") and parsed(text) is None:
            continue
        if found and not name and found[-1][:2] == (kind, ""):
            found[-1] = (kind, "", found[-1][2] + text)
        else:
            found.append((kind, name, text))
    return found


@pytest.mark.parametrize("form", TEXTS)
@pytest.mark.parametrize("dialect", [response, message])
def test_a_stream_tells_what_the_whole_answer_says(form: ToolFormat, dialect: Callable[..., tuple[Said, Said]]) -> None:
    for text in TEXTS[form]:
        _, whole = dialect(text, form, len(text) or 1, streams=False)
        for size in (1, 7):
            told, ended = dialect(text, form, size, streams=True)
            assert told == ended
            assert complete(told) == complete(whole)
