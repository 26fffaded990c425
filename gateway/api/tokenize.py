"""`POST /tokenize` and `POST /detokenize`, as vLLM answers them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.chat_request import Message, TemplateSettings, Tool
from gateway.api.fields import Model, Tokens
from gateway.convert import conversation
from gateway.request_context import context_of
from gateway.services import LlmServices
from gateway.stream import json_answer
from gateway.tools import definition
from twinlens.v1 import llm_pb2


class TokenizeRequest(Model):
    """vLLM's request for tokens: of a text, which is a whole prompt, or of a chat."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {"tools": ([],)}

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(max_length=4096, fail_fast=True)] | None = None
    chat_template_kwargs: TemplateSettings | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _is_about_one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages")
        if self.messages is None and (self.tools or self.chat_template_kwargs or self.continue_final_message):
            raise ValueError("tools, chat_template_kwargs and continue_final_message go with messages")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("either the final message is continued, or a new one is begun")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("the chat template sets special tokens of messages: add_special_tokens goes with prompt")
        return self


class DetokenizeRequest(Model):
    """vLLM's question about their text."""

    model: str | None = None
    tokens: Tokens


class Tokenizer:
    """Converts texts to tokens and back."""

    def __init__(self, services: LlmServices) -> None:
        self._services = services

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text, or of a chat without media."""
        context = context_of(request, "tokenize")
        asked = await context.read(TokenizeRequest)
        if asked.messages is None:
            whole = asked.add_special_tokens is not False
            message = llm_pb2.TokenizeRequest(text=asked.prompt, allow_special=True, add_special_tokens=whole)
        else:
            message = llm_pb2.TokenizeRequest(messages_alone=asked.add_generation_prompt is False)
            given = asked.messages, None, asked.chat_template_kwargs, "messages"
            await context.made(conversation.fill_chat, message.chat, *given)
            message.chat.continue_final_message = bool(asked.continue_final_message)
            message.chat.tools.extend(definition(tool.function) for tool in asked.tools or ())
        message.with_texts = bool(asked.return_token_strs)
        reply, info = await self._services.tokenize(asked.model or "", message, context.metadata)
        ids = list(reply.ids)
        texts = {"token_strs": list(reply.texts)} if asked.return_token_strs else {}
        return json_answer({"count": len(ids), "max_model_len": info.context_tokens, "tokens": ids, **texts})

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        context = context_of(request, "tokenize")
        asked = await context.read(DetokenizeRequest)
        message = llm_pb2.DetokenizeRequest(ids=asked.tokens)
        reply = await self._services.detokenize(asked.model or "", message, context.metadata)
        return json_answer({"prompt": reply.text})
