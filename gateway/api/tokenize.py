"""`POST /tokenize` and `POST /detokenize`, as vLLM answers them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from gateway import convert
from gateway.api.chat_request import Message
from gateway.api.fields import MediaSettings, Model, Tokens
from gateway.request_context import context_of
from gateway.services import LlmServices
from gateway.stream import json_answer
from twinlens.v1 import llm_pb2


class TokenizeRequest(Model):
    """vLLM's question about tokens: of a text, or of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _is_about_one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages")
        return self


class DetokenizeRequest(Model):
    """vLLM's question about their text."""

    model: str | None = None
    tokens: Tokens


class Tokenizer:
    """Answers which tokens a text has, and the other way about."""

    def __init__(self, services: LlmServices) -> None:
        self._services = services

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text, or of a chat without media."""
        context = context_of(request, "tokenize")
        asked = await context.read(TokenizeRequest)
        if asked.messages is None:
            message = llm_pb2.TokenizeRequest(text=asked.prompt, allow_special=True)
        else:
            chat = llm_pb2.ChatInput(
                messages=[
                    convert.message(each, MediaSettings(), f"messages[{number}]")
                    for number, each in enumerate(asked.messages)
                ]
            )
            message = llm_pb2.TokenizeRequest(chat=chat)
        reply, info = await self._services.tokenize(asked.model or "", message, context.metadata)
        ids = list(reply.ids)
        return json_answer({"count": len(ids), "max_model_len": info.context_tokens, "tokens": ids})

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        context = context_of(request, "tokenize")
        asked = await context.read(DetokenizeRequest)
        message = llm_pb2.DetokenizeRequest(ids=asked.tokens)
        reply = await self._services.detokenize(asked.model or "", message, context.metadata)
        return json_answer({"prompt": reply.text})
