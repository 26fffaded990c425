"""The answer to a chat: asked for, and each choice's text taken apart. Surfaces of chats differ in how they tell it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Container, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from gateway.api.chat_request import ChatRequest
from gateway.convert import conversation, field_names
from gateway.generation import Generations
from gateway.output_parser import OutputParser, Piece
from gateway.prompt_logprobs import CollectedLogprobs, collected
from gateway.request_context import RequestContext
from gateway.services import LlmServices
from gateway.tools import functions_of, loose_form, tool_format
from twinlens.v1 import llm_pb2


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """More of a choice: the text that this `delta` completes."""

    pieces: Sequence[Piece]
    delta: llm_pb2.GenerateDelta


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """A choice is complete: the rest of its text, and its number of complete calls."""

    pieces: Sequence[Piece]
    calls: int
    finished: llm_pb2.GenerateFinished


ChatEvent: TypeAlias = llm_pb2.GenerateStarted | ChoiceDelta | ChoiceEnd


class ChatAnswers:
    """Asks for answers to chats."""

    def __init__(self, services: LlmServices, generations: Generations) -> None:
        self._services = services
        self._generations = generations

    async def begin(
        self,
        body: ChatRequest,
        request: llm_pb2.GenerateRequest,
        context: RequestContext,
        names: Mapping[str, str],
        *,
        streams: bool | Container[str],
        prompt_logprobs: CollectedLogprobs | None = None,
    ) -> AsyncGenerator[ChatEvent]:
        """The events of the answer to a chat, from which this request was made; `streams`: calls are reported before
        they are complete, or only those of functions that it names. `names` maps fields at fault to those that the
        caller knows. `prompt_logprobs` are filled before the first event. Raises TwinlensError."""
        parser = partial(
            OutputParser,
            tool_format(body, self._services.about(self._services.name(body.model))),
            functions_of(body),
            single=body.parallel_tool_calls is False,
            streams=streams,
            **conversation.form_of_answer(request),
        )
        otherwise = await context.made(loose_form, body)
        asked = self._generations.events(request, context, context.body_lease.release, otherwise=otherwise)
        events = field_names.named_by(names, asked)
        if prompt_logprobs is not None:
            events = collected(events, prompt_logprobs)
        return taken_apart(events, parser, body.n or 1)


async def taken_apart(
    events: AsyncGenerator[llm_pb2.GenerateResponse], parser: Callable[[], OutputParser], n: int = 1
) -> AsyncGenerator[ChatEvent]:
    """The events of `n` choices, each of which is parsed by its own parser."""
    parsers = [parser() for _ in range(n)]
    async with aclosing(events) as each:
        async for said in each:
            match said.WhichOneof("event"):
                case "started":
                    for parses in parsers:
                        parses.begin(said.started)
                    yield said.started
                case "delta":
                    yield ChoiceDelta(parsers[said.delta.index].feed(said.delta.text), said.delta)
                case "finished":
                    parses, finished = parsers[said.finished.index], said.finished
                    rest = parses.end(cut=finished.reason == llm_pb2.FINISH_REASON_LENGTH)
                    yield ChoiceEnd(rest, parses.calls, finished)
                case _:  # an event of a newer service
                    continue
