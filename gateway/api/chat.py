"""`POST /v1/chat/completions`: how it answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from common.aio import tasks
from gateway import measured
from gateway.api.chat_request import ChatRequest, ChatStreamOptions
from gateway.chat_answers import ChatAnswers, ChatEvent, ChoiceDelta, ChoiceEnd
from gateway.convert import answers, conversation, field_names
from gateway.output_parser import ArgumentsDelta, CallLeftOpen, CallStart, Piece, ReasoningDelta, TextDelta
from gateway.prompt_logprobs import CollectedLogprobs
from gateway.request_context import context_of
from gateway.services import LlmServices
from gateway.stream import DONE, Chunks, EventStream, Last, json_answer
from gateway.tool_parsers.json_end import broken_end
from twinlens.v1 import llm_pb2


@dataclass(slots=True)
class _Choice:
    """One choice's output so far; reasoning is left out unless it `shows_reasoning`."""

    shows_reasoning: bool
    words: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    left_open: list[int] = field(default_factory=list)
    whole_calls: int = 0
    finished: llm_pb2.GenerateFinished = field(default_factory=llm_pb2.GenerateFinished)

    def add(self, pieces: Iterable[Piece]) -> list[dict[str, Any]]:
        """Takes more output; returns the deltas of a stream."""
        return list(filter(None, map(self._add, pieces)))

    def end(self, ended: ChoiceEnd) -> list[dict[str, Any]]:
        """Takes the rest of the output; returns the deltas of a stream."""
        self.finished, self.whole_calls = ended.finished, ended.calls
        return self.add(ended.pieces)

    def _add(self, piece: Piece) -> dict[str, Any]:
        match piece:
            case TextDelta(text):
                self.words.append(text)
                return {"content": text}
            case ReasoningDelta() if not self.shows_reasoning:
                return {}
            case ReasoningDelta(text):
                self.thoughts.append(text)
                return {"reasoning_content": text, "reasoning": text}
            case CallStart(name):
                call = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
                self.calls.append({**call, "function": {"name": name, "arguments": ""}})
                begun = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": len(self.calls) - 1, **call, "function": begun}]}
            case ArgumentsDelta(text):
                function = self.calls[-1]["function"]
                function["arguments"] += text
                return {"tool_calls": [{"index": len(self.calls) - 1, "function": {"arguments": text}}]}
            case CallLeftOpen():
                self.left_open.append(len(self.calls) - 1)
                return {}

    def last_delta(self) -> dict[str, Any]:
        """The delta with the finish reason: clients that complete open arguments get none that they could complete, and
        clients that go by the reason see it first."""
        broken = [(index, broken_end(self.calls[index]["function"]["arguments"])) for index in self.left_open]
        calls = [{"index": index, "function": {"arguments": end}} for index, end in broken]
        return {"tool_calls": calls} if calls else {}

    def finish(self) -> dict[str, Any]:
        """Why it ended."""
        ended = answers.finish(self.finished)
        if self.whole_calls and ended["finish_reason"] == "stop":
            ended["finish_reason"] = "tool_calls"
        return ended

    def message(self) -> dict[str, Any]:
        """The whole message."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.words), "refusal": None}
        if self.thoughts:
            message["reasoning_content"] = message["reasoning"] = "".join(self.thoughts)
        if self.calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = self.calls
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The parts of a request that matter for its response."""

    head: dict[str, Any]
    n: int
    with_logprobs: bool
    as_ids: bool
    with_ids: bool
    with_uuids: bool
    prompt_logprobs: CollectedLogprobs | None
    with_usage: bool
    with_usage_so_far: bool
    with_timings: bool
    shows_reasoning: bool

    def choices(self) -> list[_Choice]:
        """Choices without output."""
        return [_Choice(self.shows_reasoning) for _ in range(self.n)]

    def beside(self, delta: llm_pb2.GenerateDelta) -> dict[str, Any]:
        """The fields of a chunk besides the delta."""
        told: dict[str, Any] = {}
        if delta.logprobs and self.with_logprobs:
            told["logprobs"] = {"content": self.logprobs(delta)}
        if delta.token_ids and self.with_ids:
            told["token_ids"] = list(delta.token_ids)
        return told

    def logprobs(self, delta: llm_pb2.GenerateDelta) -> list[dict[str, Any]]:
        """How likely new tokens were."""
        given = delta.logprobs
        return answers.chat_logprobs(answers.named_by_ids(given, delta.token_ids) if self.as_ids and given else given)

    async def prompt(self, started: llm_pb2.GenerateStarted) -> dict[str, Any]:
        """The fields about the prompt."""
        told: dict[str, Any] = {}
        if self.with_ids:
            told["prompt_token_ids"] = list(started.prompt_token_ids)
        if self.with_uuids:
            told["media_uuids"] = answers.media_uuids(started)
        if self.prompt_logprobs is not None:
            told["prompt_logprobs"] = await tasks.to_thread(self.prompt_logprobs.as_vllm)
        return told


class Chat:
    """Answers requests for chat completions."""

    def __init__(self, services: LlmServices, chats: ChatAnswers) -> None:
        self._services = services
        self._chats = chats

    async def answer(self, request: Request) -> Response:
        """One request, streamed or whole."""
        context = context_of(request, "chat")
        body = await context.read(ChatRequest)
        message = await context.made(conversation.chat_request, body, context.id)
        name = self._services.name(body.model)
        options = body.stream_options or ChatStreamOptions()
        asked = _Asked(
            head={"id": f"chatcmpl-{context.id}", "created": int(time.time()), "model": name},
            n=body.n or 1,
            with_logprobs=bool(body.logprobs),
            as_ids=bool(body.return_tokens_as_token_ids),
            with_ids=bool(body.return_token_ids),
            with_uuids=bool(body.return_media_uuids),
            prompt_logprobs=CollectedLogprobs() if body.prompt_logprobs is not None else None,
            with_usage=bool(options.include_usage),
            with_usage_so_far=bool(options.include_usage and options.continuous_usage_stats),
            with_timings=bool(options.include_timings),
            shows_reasoning=body.include_reasoning is not False,
        )
        stream = bool(body.stream)
        events = await self._chats.begin(
            body, message, context, field_names.names_of(body), streams=stream, prompt_logprobs=asked.prompt_logprobs
        )
        del message, body
        return EventStream(_chunks(events, asked)) if stream else json_answer(await _whole(events, asked))


async def _chunks(events: AsyncGenerator[ChatEvent], asked: _Asked) -> AsyncGenerator[bytes]:
    chunks = Chunks({**asked.head, "object": "chat.completion.chunk"})
    more: dict[str, Any] = {"usage": None} if asked.with_usage else {}
    choices, tokens, still = asked.choices(), 0, asked.n
    ending = b""  # of the choice that ends last: the end of the stream follows at once
    started, finished = llm_pb2.GenerateStarted(), llm_pb2.GenerateFinished()

    def chunk(index: int, delta: dict[str, Any], prompt: dict[str, Any] | None = None, **rest: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **rest}
        if asked.with_usage_so_far:
            more["usage"] = answers.usage_of(started.prompt_tokens, started.cached_tokens, tokens)
        return chunks.chunk({"choices": [choice], **more, **(prompt or {})})

    async with aclosing(events) as each:
        async for said in each:
            match said:
                case llm_pb2.GenerateStarted():
                    started = said
                    begin, prompt = {"role": "assistant", "content": ""}, await asked.prompt(started)
                    yield b"".join(chunk(index, begin, None if index else prompt) for index in range(asked.n))
                case ChoiceDelta(pieces, new):
                    tokens += len(new.token_ids)
                    beside = asked.beside(new)
                    for delta in choices[new.index].add(pieces) or ([{"content": ""}] if beside else []):
                        yield chunk(new.index, delta, **beside)
                        beside = {}
                case ChoiceEnd(finished=finished):
                    index, choice = finished.index, choices[finished.index]
                    rest = [chunk(index, delta) for delta in choice.end(said)]
                    ending = b"".join((*rest, chunk(index, choice.last_delta(), **choice.finish())))
                    still -= 1
                    if still:
                        yield ending
                        ending = b""
    last: dict[str, Any] = {}
    if asked.with_usage:
        last["usage"] = answers.usage([[choice.finished for choice in choices]])
    if asked.with_timings:
        last["timings"] = measured.timings(started, finished)
    yield Last(ending + (chunks.chunk({"choices": [], **last}) if last else b"") + DONE)


async def _whole(events: AsyncGenerator[ChatEvent], asked: _Asked) -> dict[str, Any]:
    choices = asked.choices()
    prompt: dict[str, Any] = {}
    async with aclosing(events) as each:
        async for said in each:
            match said:
                case llm_pb2.GenerateStarted():
                    prompt = await asked.prompt(said)
                case ChoiceDelta(pieces, new):
                    choice = choices[new.index]
                    choice.add(pieces)
                    choice.logprobs += asked.logprobs(new)
                    choice.token_ids += new.token_ids
                case ChoiceEnd():
                    choices[said.finished.index].end(said)
    return {
        **asked.head,
        "object": "chat.completion",
        "choices": [
            {
                "index": index,
                "message": choice.message(),
                "logprobs": {"content": choice.logprobs, "refusal": None} if asked.with_logprobs else None,
                **choice.finish(),
                **({"token_ids": choice.token_ids} if asked.with_ids else {}),
            }
            for index, choice in enumerate(choices)
        ],
        "usage": answers.usage([[choice.finished for choice in choices]]),
        **prompt,
    }
