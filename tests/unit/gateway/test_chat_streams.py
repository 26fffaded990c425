"""What a stream of a chat says, put together, is what the whole answer says: of every form of calls, of several choices
that come in turns, token by token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import pytest

from gateway.api import chat
from gateway.chat_answers import ChatEvent, taken_apart
from gateway.output_parser import OutputParser
from gateway.tool_parsers.arguments import parsed
from gateway.tool_parsers.tool_format import ToolFormat
from tests.unit.gateway.test_output_parser import CASES
from tests.unit.gateway.test_tool_parsers import FAMILIES, FUNCTIONS
from twinlens import v1

TEXTS = {form: [text for text, _ in cases.values()] for form, cases in FAMILIES.items()}
for said, its, settings, _ in CASES.values():
    if its is not ToolFormat.ARGUMENTS and not settings and len(said) < 1000:
        TEXTS.setdefault(its, []).append(said)


async def events(texts: list[str], size: int) -> AsyncGenerator[v1.GenerateResponse]:
    """Choices that take turns, in pieces of this size, one token each."""
    yield v1.GenerateResponse(started=v1.GenerateStarted(prompt_tokens=3, prompt_token_ids=[7, 8, 9]))
    for begin in range(0, max(map(len, texts)), size):
        for index, text in enumerate(texts):
            if piece := text[begin : begin + size]:
                scores = [v1.TokenLogprobs(logprob=-0.5, text=piece, text_bytes=piece.encode())]
                delta = v1.GenerateDelta(index=index, text=piece, token_ids=[begin + 1], logprobs=scores)
                yield v1.GenerateResponse(delta=delta)
    for index, text in enumerate(texts):
        usage = v1.Usage(prompt_tokens=3, completion_tokens=len(text), reasoning_tokens=1)
        finished = v1.GenerateFinished(index=index, reason=v1.FINISH_REASON_STOP, usage=usage)
        yield v1.GenerateResponse(finished=finished)


def put_together(stream: bytes, n: int) -> dict[str, Any]:
    """The choices of a stream, without calls that were begun and never ended, and its usage."""
    *lines, end = stream.decode().removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    choices: list[dict[str, Any]] = [{"text": {}, "calls": [], "scores": [], "token_ids": []} for _ in range(n)]
    usage = None
    for chunk in (json.loads(line.removeprefix("data: ")) for line in lines):
        usage = chunk["usage"]
        for told in chunk["choices"]:
            choice = choices[told["index"]]
            assert "finish_reason" not in choice, "nothing comes behind the end"
            for name in ("content", "reasoning_content"):
                choice["text"][name] = choice["text"].get(name, "") + told["delta"].get(name, "")
            for call in told["delta"].get("tool_calls", []):
                if call["index"] == len(choice["calls"]):
                    choice["calls"].append(["", ""])
                choice["calls"][call["index"]][0] += call["function"].get("name", "")
                choice["calls"][call["index"]][1] += call["function"]["arguments"]
            choice["scores"] += (told["logprobs"] or {"content": []})["content"]
            choice["token_ids"] += told.get("token_ids", [])
            if told["finish_reason"]:
                choice["finish_reason"] = told["finish_reason"]
    for choice in choices:
        choice["calls"] = [call for call in choice["calls"] if parsed(call[1]) is not None]
    return {"choices": choices, "usage": usage}


def as_put_together(whole: dict[str, Any]) -> dict[str, Any]:
    """The same of a whole answer."""
    return {
        "choices": [
            {
                "text": {name: choice["message"].get(name) or "" for name in ("content", "reasoning_content")},
                "calls": [
                    [call["function"]["name"], call["function"]["arguments"]]
                    for call in choice["message"].get("tool_calls", [])
                ],
                "scores": choice["logprobs"]["content"],
                "token_ids": choice["token_ids"],
                "finish_reason": choice["finish_reason"],
            }
            for choice in whole["choices"]
        ],
        "usage": whole["usage"],
    }


@pytest.mark.parametrize("form", TEXTS)
@pytest.mark.parametrize("size", [1, 7])
def test_a_stream_says_what_the_whole_answer_says(form: ToolFormat, size: int) -> None:
    async def both() -> tuple[bytes, dict[str, Any]]:
        stream = b"".join([part async for part in chat._chunks(answer(streams=True), asked)])
        return stream, await chat._whole(answer(streams=False), asked)

    def answer(*, streams: bool) -> AsyncGenerator[ChatEvent]:
        parser = partial(OutputParser, form, FUNCTIONS, streams=streams)
        return taken_apart(events(texts, size), parser, len(texts))

    texts = TEXTS[form]
    asked = chat._Asked(
        head={"id": "x"},
        n=len(texts),
        with_logprobs=True,
        as_ids=False,
        with_ids=True,
        with_uuids=False,
        prompt_logprobs=None,
        with_usage=True,
        with_usage_so_far=False,
        with_timings=False,
        shows_reasoning=True,
    )
    stream, whole = asyncio.run(both())
    assert put_together(stream, len(texts)) == as_put_together(whole)
