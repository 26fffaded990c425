"""`POST /v1/responses`, without stored state: a request is a chat's, told otherwise, and so is its answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from common.errors import TwinlensError
from gateway.api.chat_request import ChatRequest
from gateway.api.responses_input import as_chat, of_input
from gateway.api.responses_output import Output
from gateway.api.responses_request import ResponsesRequest
from gateway.convert import conversation, field_names
from gateway.errors import from_validation
from gateway.generation import Generations
from gateway.output_parser import OutputParser
from gateway.request_context import context_of
from gateway.services import LlmServices
from gateway.stream import EventStream, json_answer
from gateway.tools import functions_of, loose_form, tool_format
from twinlens.v1 import llm_pb2


class Responses:
    """Answers requests for responses."""

    def __init__(self, services: LlmServices, generations: Generations) -> None:
        self._services = services
        self._generations = generations

    async def answer(self, request: Request) -> Response:
        """One request, streamed or whole."""
        context = context_of(request, "responses")
        asked = await context.read(ResponsesRequest)
        places: list[int] = []
        body = await context.made(_chat, asked, places)
        name = self._services.name(asked.model)
        try:
            message = await context.made(conversation.chat_request, body, context.id)
            calls = tool_format(body, self._services.about(name))
        except TwinlensError as error:
            raise of_input(error, places) from None
        parser = OutputParser(
            calls,
            functions_of(body),
            single=asked.parallel_tool_calls is False,
            streams=bool(asked.stream),
            **conversation.form_of_answer(message),
        )
        output = Output(asked, context.id, name, parser)
        otherwise = await context.made(loose_form, body)
        answer = self._generations.events(message, context, context.body_lease.release, otherwise=otherwise)
        generation = field_names.named_by(field_names.names_of(body), answer)
        stream = asked.stream
        del message, body, asked
        told = _told(generation, output, places)
        if stream:
            context.failing = output.failed
            return EventStream(_encoded(told, output))
        async with aclosing(told) as events:
            async for _ in events:
                pass
        return json_answer(output.response())


def _chat(asked: ResponsesRequest, places: list[int]) -> ChatRequest:
    try:
        return ChatRequest.model_validate(as_chat(asked, places))
    except ValidationError as error:
        raise of_input(from_validation(error), places) from None


async def _told(
    generation: AsyncGenerator[llm_pb2.GenerateResponse], output: Output, places: list[int]
) -> AsyncGenerator[dict[str, Any]]:
    """What a stream tells, in order."""
    try:
        async with aclosing(generation) as events:
            async for said in events:
                match said.WhichOneof("event"):
                    case "started":
                        output.parser.begin(said.started)
                        yield {"type": "response.created", "response": output.response()}
                        yield {"type": "response.in_progress", "response": output.response()}
                    case "delta":
                        for each in output.add(output.parser.feed(said.delta.text)):
                            yield each
                    case "finished":
                        for each in output.finish(said.finished):
                            yield each
                    case _:  # an event of a newer service
                        continue
    except TwinlensError as error:
        raise of_input(error, places) from None


async def _encoded(told: AsyncGenerator[dict[str, Any]], output: Output) -> AsyncGenerator[bytes]:
    async with aclosing(told) as events:
        async for each in events:
            yield output.event(each)
