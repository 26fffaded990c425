"""`POST /v1/responses`, without stored state: a request is a chat's, told otherwise, and so is its answer; and
`POST /v1/responses/input_tokens`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from common.errors import TwinlensError
from gateway.api.chat_request import ChatRequest
from gateway.api.responses_input import as_chat, of_input
from gateway.api.responses_output import Output
from gateway.api.responses_request import InputTokensRequest, OfferedFunction, ResponsesRequest
from gateway.chat_answers import ChatAnswers, ChatEvent
from gateway.convert import conversation, field_names
from gateway.errors import from_validation
from gateway.prompt_counts import PromptCounts
from gateway.request_context import context_of
from gateway.services import LlmServices
from gateway.stream import EventStream, json_answer


class Responses:
    """Answers requests for responses."""

    def __init__(self, services: LlmServices, chats: ChatAnswers, counts: PromptCounts) -> None:
        self._services = services
        self._chats = chats
        self._counts = counts

    async def answer(self, request: Request) -> Response:
        """One request, streamed or whole."""
        context = context_of(request, "responses")
        asked = await context.read(ResponsesRequest)
        places: list[int] = []
        body = await context.made(_chat, asked, places)
        functions = asked.functions
        output, stream = Output(asked, context.id, self._services.name(asked.model)), bool(asked.stream)
        try:
            message = await context.made(conversation.chat_request, body, context.id)
            names = field_names.names_of(body)
            generation = await self._chats.begin(body, message, context, names, streams=stream)
        except TwinlensError as error:
            raise of_input(error, places, functions) from None
        del message, body, asked
        told = _told(generation, output, places, functions)
        if stream:
            context.failing = output.failed
            return EventStream(_encoded(told, output))
        async with aclosing(told) as events:
            async for _ in events:
                pass
        return json_answer(output.response())

    async def count(self, request: Request) -> Response:
        """The tokens of the prompt that a request would have."""
        context = context_of(request, "responses")
        asked = await context.read(InputTokensRequest)
        places: list[int] = []
        body = await context.made(_chat, asked, places)
        try:
            message = await context.made(conversation.chat_request, body, context.id)
            count = await self._counts.count(message, context)
        except TwinlensError as error:
            raise of_input(error, places, asked.functions) from None
        return json_answer({"object": "response.input_tokens", "input_tokens": count})


def _chat(asked: InputTokensRequest, places: list[int]) -> ChatRequest:
    try:
        return ChatRequest.model_validate(as_chat(asked, places))
    except ValidationError as error:
        raise of_input(from_validation(error), places, asked.functions) from None


async def _told(
    generation: AsyncGenerator[ChatEvent], output: Output, places: list[int], functions: Sequence[OfferedFunction]
) -> AsyncGenerator[dict[str, Any]]:
    """The events of a stream, in order."""
    try:
        async with aclosing(generation) as events:
            async for said in events:
                for each in output.add(said):
                    yield each
    except TwinlensError as error:
        raise of_input(error, places, functions) from None


async def _encoded(told: AsyncGenerator[dict[str, Any]], output: Output) -> AsyncGenerator[bytes]:
    async with aclosing(told) as events:
        async for each in events:
            yield output.event(each)
