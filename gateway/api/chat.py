"""`POST /v1/chat/completions`: how it answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from common import tasks
from gateway import measured
from gateway.api.chat_request import ChatRequest, ChatStreamOptions
from gateway.convert import answers, conversation, field_names
from gateway.generation import Generations
from gateway.output_parser import (
    ArgumentsDelta,
    CallLeftOpen,
    CallStart,
    OutputParser,
    Piece,
    ReasoningDelta,
    TextDelta,
)
from gateway.prompt_scores import PromptScores, collected
from gateway.request_context import context_of
from gateway.services import LlmServices
from gateway.stream import DONE, Chunks, EventStream, Last, json_answer
from gateway.tool_parsers.tool_format import ToolFormat
from gateway.tools import functions_of, loose_form, tool_format
from twinlens.v1 import llm_pb2


@dataclass(slots=True)
class _Choice:
    """What one choice has said so far; what it thinks is left out where that is not `shows_reasoning`."""

    parser: OutputParser
    shows_reasoning: bool = True
    words: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finished: llm_pb2.GenerateFinished = field(default_factory=llm_pb2.GenerateFinished)

    def add(self, piece: Piece) -> dict[str, Any]:
        """Takes more of it in; returns what a stream says of it, which may be nothing."""
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
                return {}

    def end(self) -> list[Piece]:
        """What is left of it once it has `finished`."""
        return self.parser.end(cut=self.finished.reason == llm_pb2.FINISH_REASON_LENGTH)

    def finish(self) -> dict[str, Any]:
        """Why it ended."""
        ended = answers.finish(self.finished)
        if self.parser.calls and ended["finish_reason"] == "stop":
            ended["finish_reason"] = "tool_calls"
        return ended

    def message(self) -> dict[str, Any]:
        """All of it."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.words), "refusal": None}
        if self.thoughts:
            message["reasoning_content"] = message["reasoning"] = "".join(self.thoughts)
        if self.calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = self.calls
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What of a request matters to its answer."""

    head: dict[str, Any]
    n: int
    scored: bool
    as_ids: bool
    with_ids: bool
    with_uuids: bool
    prompt_scores: PromptScores | None
    with_usage: bool
    with_usage_so_far: bool
    with_timings: bool
    shows_reasoning: bool
    tools: ToolFormat
    functions: dict[str, dict[str, Any]]
    single: bool
    form: dict[str, bool]
    streams: bool

    def choice(self, started: llm_pb2.GenerateStarted) -> _Choice:
        """One that has said nothing yet."""
        parser = OutputParser(self.tools, self.functions, single=self.single, streams=self.streams, **self.form)
        parser.begin(started)
        return _Choice(parser, self.shows_reasoning)

    def beside(self, delta: llm_pb2.GenerateDelta) -> dict[str, Any]:
        """What a stream says of new tokens beside their text."""
        told: dict[str, Any] = {}
        if delta.logprobs and self.scored:
            told["logprobs"] = {"content": self.logprobs(delta)}
        if delta.token_ids and self.with_ids:
            told["token_ids"] = list(delta.token_ids)
        return told

    def logprobs(self, delta: llm_pb2.GenerateDelta) -> list[dict[str, Any]]:
        """How likely new tokens were."""
        given = delta.logprobs
        return answers.chat_logprobs(answers.named_by_ids(given, delta.token_ids) if self.as_ids and given else given)

    async def prompt(self, started: llm_pb2.GenerateStarted) -> dict[str, Any]:
        """What is said of the prompt."""
        told: dict[str, Any] = {}
        if self.with_ids:
            told["prompt_token_ids"] = list(started.prompt_token_ids)
        if self.with_uuids:
            told["media_uuids"] = answers.media_uuids(started)
        if self.prompt_scores is not None:
            told["prompt_logprobs"] = await tasks.to_thread(self.prompt_scores.as_vllm)
        return told


class Chat:
    """Answers requests for chat completions."""

    def __init__(self, services: LlmServices, generations: Generations) -> None:
        self._services = services
        self._generations = generations

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
            scored=bool(body.logprobs),
            as_ids=bool(body.return_tokens_as_token_ids),
            with_ids=bool(body.return_token_ids),
            with_uuids=bool(body.return_media_uuids),
            prompt_scores=PromptScores() if body.prompt_logprobs is not None else None,
            with_usage=bool(options.include_usage),
            with_usage_so_far=bool(options.include_usage and options.continuous_usage_stats),
            with_timings=bool(options.include_timings),
            shows_reasoning=body.include_reasoning is not False,
            tools=tool_format(body, self._services.about(name)),
            functions=functions_of(body),
            single=body.parallel_tool_calls is False,
            form=conversation.form_of_answer(message),
            streams=bool(body.stream),
        )
        otherwise = await context.made(loose_form, body)
        generation = self._generations.events(message, context, context.body_lease.release, otherwise=otherwise)
        events = field_names.named_by(field_names.names_of(body), generation)
        if asked.prompt_scores is not None:
            events = collected(events, asked.prompt_scores)
        stream = body.stream
        del message, body
        return EventStream(_chunks(events, asked)) if stream else json_answer(await _whole(events, asked))


Events = AsyncGenerator[llm_pb2.GenerateResponse]


async def _chunks(events: Events, asked: _Asked) -> AsyncGenerator[bytes]:
    chunks = Chunks({**asked.head, "object": "chat.completion.chunk"})
    more: dict[str, Any] = {"usage": None} if asked.with_usage else {}
    choices: list[_Choice] = []
    tokens, still = 0, asked.n
    ending = b""  # of the choice that ends last: the end of the stream follows at once
    started, finished = llm_pb2.GenerateStarted(), llm_pb2.GenerateFinished()

    def chunk(index: int, delta: dict[str, Any], prompt: dict[str, Any] | None = None, **rest: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **rest}
        if asked.with_usage_so_far:
            more["usage"] = answers.usage_of(started.prompt_tokens, started.cached_tokens, tokens)
        return chunks.chunk({"choices": [choice], **more, **(prompt or {})})

    async with aclosing(events) as each:
        async for said in each:
            match said.WhichOneof("event"):
                case "started":
                    started = said.started
                    choices = [asked.choice(started) for _ in range(asked.n)]
                    begin, prompt = {"role": "assistant", "content": ""}, await asked.prompt(started)
                    yield b"".join(chunk(index, begin, None if index else prompt) for index in range(asked.n))
                case "delta":
                    index, choice = said.delta.index, choices[said.delta.index]
                    tokens += len(said.delta.token_ids)
                    deltas = list(filter(None, map(choice.add, choice.parser.feed(said.delta.text))))
                    beside = asked.beside(said.delta)
                    for delta in deltas or ([{"content": ""}] if beside else []):
                        yield chunk(index, delta, **beside)
                        beside = {}
                case "finished":
                    index, choice = said.finished.index, choices[said.finished.index]
                    finished = choice.finished = said.finished
                    rest = [chunk(index, delta) for delta in filter(None, map(choice.add, choice.end()))]
                    ending = b"".join((*rest, chunk(index, {}, **choice.finish())))
                    still -= 1
                    if still:
                        yield ending
                        ending = b""
                case _:  # an event of a newer service
                    continue
    last: dict[str, Any] = {}
    if asked.with_usage:
        last["usage"] = answers.usage([[choice.finished for choice in choices]])
    if asked.with_timings:
        last["timings"] = measured.timings(started, finished)
    yield Last(ending + (chunks.chunk({"choices": [], **last}) if last else b"") + DONE)


async def _whole(events: Events, asked: _Asked) -> dict[str, Any]:
    choices: list[_Choice] = []
    prompt: dict[str, Any] = {}
    async with aclosing(events) as each:
        async for said in each:
            match said.WhichOneof("event"):
                case "started":
                    choices = [asked.choice(said.started) for _ in range(asked.n)]
                    prompt = await asked.prompt(said.started)
                case "delta":
                    choice = choices[said.delta.index]
                    for piece in choice.parser.feed(said.delta.text):
                        choice.add(piece)
                    choice.logprobs += asked.logprobs(said.delta)
                    choice.token_ids += said.delta.token_ids
                case "finished":
                    choice = choices[said.finished.index]
                    choice.finished = said.finished
                    for piece in choice.end():
                        choice.add(piece)
                case _:
                    continue
    return {
        **asked.head,
        "object": "chat.completion",
        "choices": [
            {
                "index": index,
                "message": choice.message(),
                "logprobs": {"content": choice.logprobs, "refusal": None} if asked.scored else None,
                **choice.finish(),
                **({"token_ids": choice.token_ids} if asked.with_ids else {}),
            }
            for index, choice in enumerate(choices)
        ],
        "usage": answers.usage([[choice.finished for choice in choices]]),
        **prompt,
    }
