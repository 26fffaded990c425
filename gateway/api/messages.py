"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's way to tell a chat."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from common.errors import InvalidInput, TwinlensError
from gateway.api.messages_input import Places, as_chat
from gateway.api.messages_output import Answer
from gateway.api.messages_request import CountRequest, MessagesRequest
from gateway.chat_answers import ChatAnswers, ChatEvent
from gateway.convert import conversation
from gateway.prompt_counts import PromptCounts
from gateway.request_context import context_of
from gateway.services import LlmServices
from gateway.stream import EventStream, Last, event, json_answer
from gateway.tools import places_of

_VERSIONS = ("2023-06-01", "2026-10-21")
"""Versions of the API. The later one only refuses more, such as temperatures, for models that are not served here."""


class Messages:
    """Answers requests for messages, and for their token counts."""

    def __init__(self, services: LlmServices, chats: ChatAnswers, counts: PromptCounts) -> None:
        self._services = services
        self._chats = chats
        self._counts = counts

    async def answer(self, request: Request) -> Response:
        """One request, streamed or whole."""
        context = context_of(request, "messages")
        _check_version(request)
        asked = await context.read(MessagesRequest)
        if asked.messages[-1].role == "assistant" and asked.thinking and asked.thinking.type == "enabled":
            why = "an answer that continues an assistant message cannot think first"
            raise InvalidInput(why, reason="BAD_FIELD", field="thinking")
        body, places = await context.made(as_chat, asked)
        name, stream = self._services.name(asked.model), bool(asked.stream)
        fills = partial(self._services.fills_a_context, model=name)
        eager = asked.eager_tools(request.headers.get("anthropic-beta", "")) if stream else frozenset()
        answer = Answer(context.id, name, asked.max_tokens, fills, eager)
        try:
            message = await context.made(conversation.chat_request, body, context.id)
            generation = await self._chats.begin(body, message, context, places_of(body), streams=eager)
        except TwinlensError as error:
            raise places.named(error) from None
        del message, body, asked
        told = _told(generation, answer, places)
        if stream:
            return EventStream(_encoded(told))
        async with aclosing(told) as events:
            async for _ in events:
                pass
        return json_answer(answer.message())

    async def count(self, request: Request) -> Response:
        """The tokens of the prompt that a request would have."""
        context = context_of(request, "messages")
        _check_version(request)
        asked = await context.read(CountRequest)
        body, places = await context.made(as_chat, asked)
        try:
            whole = await context.made(conversation.chat_request, body, context.id)
            count = await self._counts.count(whole, context)
        except TwinlensError as error:
            raise places.named(error) from None
        return json_answer({"input_tokens": count})


def _check_version(request: Request) -> None:
    """Raises InvalidInput for a version of the API that is not served; it may be missing."""
    if request.headers.get("anthropic-version", _VERSIONS[-1]) not in _VERSIONS:
        why = f"the supported versions are {' and '.join(_VERSIONS)}"
        raise InvalidInput(why, reason="BAD_FIELD", field="anthropic-version")


async def _told(
    generation: AsyncGenerator[ChatEvent], answer: Answer, places: Places
) -> AsyncGenerator[list[dict[str, Any]]]:
    """The events of a stream, in order; each list belongs together."""
    try:
        async with aclosing(generation) as events:
            async for said in events:
                yield list(answer.add(said))
    except TwinlensError as error:
        raise places.named(error) from None


async def _encoded(told: AsyncGenerator[list[dict[str, Any]]]) -> AsyncGenerator[bytes]:
    ending = b""
    async with aclosing(told) as together:
        async for events in together:
            content = b"".join(event(each, each["type"]) for each in events)
            if events and events[-1]["type"] == "message_stop":
                ending = content  # the end of the stream follows at once
            elif content:
                yield content
    yield Last(ending)
