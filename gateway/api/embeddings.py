"""`POST /v1/embeddings`: its body and responses."""

from __future__ import annotations

import base64
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from common.errors import InvalidInput, TwinlensError
from gateway.api.chat_request import Message, TemplateSettings
from gateway.api.fields import Count, IdFields, Int, MediaSettings, Prompt, TruncationFields
from gateway.convert import answers, conversation, prompt_inputs
from gateway.embedding_calls import EmbeddingCalls
from gateway.prompt_turns import PromptBatches
from gateway.request_context import RequestContext, context_of
from gateway.services import LlmServices
from gateway.stream import list_answer
from twinlens.v1 import llm_pb2

Conversation = Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]


def _depth(value: Any) -> str:
    """The alternative of a field that has one conversation or several."""
    return "$several" if isinstance(value, list) and value and isinstance(value[0], list) else "$one"


class EmbeddingRequest(IdFields, TruncationFields):
    """The body of a request."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {
        "add_special_tokens": (True,),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
    }

    input: Prompt | None = None
    messages: (
        Annotated[
            Annotated[Conversation, Tag("$one")]
            | Annotated[list[Conversation], Field(max_length=4096, fail_fast=True), Tag("$several")],
            Discriminator(_depth),
        ]
        | None
    ) = None
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Int | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: Int | None = None
    max_handovers: Count | None = None
    add_special_tokens: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: TemplateSettings | None = None
    mm_processor_kwargs: MediaSettings | None = None

    @model_validator(mode="after")
    def _is_of_one_of_both(self) -> EmbeddingRequest:
        if (self.input is None) == (self.messages is None):
            raise ValueError("give input or messages")
        of_chats = self.continue_final_message or self.chat_template_kwargs or self.mm_processor_kwargs
        if self.messages is None and of_chats:
            raise ValueError("continue_final_message and settings of templates and media go with messages")
        if self.messages is not None and self.add_special_tokens is False:
            raise ValueError("the chat template sets special tokens of messages: add_special_tokens goes with input")
        return self


@dataclass(frozen=True, slots=True)
class _Embedded:
    """A prompt's vector as JSON, and its usage."""

    vector: bytes
    usage: llm_pb2.Usage


class Embeddings:
    """Answers requests for embeddings of texts, token ids and conversations with media."""

    def __init__(self, services: LlmServices, embeddings: EmbeddingCalls, batches: PromptBatches) -> None:
        self._services = services
        self._batches = batches
        self._embeddings = embeddings

    async def answer(self, request: Request) -> Response:
        """One request: its prompts are computed in parallel, some at a time, and the first error ends all of them."""
        context = context_of(request, "embeddings")
        asked = await context.read(EmbeddingRequest)
        prompts = await context.made(self._prompts, asked)
        messages = (
            _message(asked, prompt_inputs.name_of(context.id, number, len(prompts)), prompt)
            for number, prompt in enumerate(prompts.values())
        )
        going = dict(zip(prompts, prompt_inputs.within(self._batches.max_bytes, messages), strict=True))

        async def embed(one: tuple[str, llm_pb2.EmbedRequest]) -> _Embedded:
            return await self._embed(one[1], one[0], asked.encoding_format, context)

        found = await self._batches.turns.batch(context, len(going)).each(embed, list(going.items()))
        prompt_tokens, cached = (
            sum(getattr(each.usage, name) for each in found) for name in ("prompt_tokens", "cached_tokens")
        )
        head = {
            "id": f"embd-{context.id}",
            "object": "list",
            "created": int(time.time()),
            "model": self._services.name(asked.model),
            "usage": answers.usage_of(prompt_tokens, cached, 0),
        }
        data = (
            b'{"object":"embedding","index":%d,"embedding":%b}' % (index, each.vector)
            for index, each in enumerate(found)
        )
        return list_answer(head, "data", data)

    def _prompts(self, asked: EmbeddingRequest) -> dict[str, dict[str, Any]]:
        """The input for each prompt, by its place in the body."""
        if asked.input is not None:
            bare = asked.add_special_tokens is False
            inputs = prompt_inputs.prompts(asked.input, self._batches.max_prompts, "input", bare=bare)
            return {_at("input", number, len(inputs)): each for number, each in enumerate(inputs)}
        given: Any = asked.messages
        chats: list[list[Message]] = [given] if isinstance(given[0], Message) else given
        prompt_inputs.check_prompts(len(chats), self._batches.max_prompts, "messages")
        found: dict[str, dict[str, Any]] = {}
        for number, messages in enumerate(chats):
            at = _at("messages", number, len(chats))
            if asked.continue_final_message:
                messages = _without_empty_answer(messages)
            chat = llm_pb2.ChatInput()
            conversation.fill_chat(chat, messages, asked.mm_processor_kwargs, asked.chat_template_kwargs, at)
            found[at] = {"chat": chat}
        return found

    async def _embed(
        self, message: llm_pb2.EmbedRequest, at: str, encoding_format: str, context: RequestContext
    ) -> _Embedded:
        """Each vector is serialised when it arrives: all together would block the event loop."""
        try:
            found = await self._embeddings.embed(message, context)
        except TwinlensError as error:
            raise error.at(_param(error.field, at)) from None
        return _Embedded(_written(found.values, encoding_format), found.usage)


def _message(asked: EmbeddingRequest, name: str, prompt: dict[str, Any]) -> llm_pb2.EmbedRequest:
    """The LLM service's request for one prompt."""
    return llm_pb2.EmbedRequest(
        request_id=name,
        model=asked.model or "",
        dimensions=asked.dimensions,
        cache_salt=asked.cache_salt or "",
        priority=asked.priority or 0,
        max_handovers=asked.max_handovers,
        **asked.truncation("right"),
        **prompt,
    )


def _at(field: str, number: int, prompts: int) -> str:
    return field if prompts == 1 else f"{field}[{number}]"


def _param(field: str, at: str) -> str:
    """What the caller calls a field of one prompt, which stands at this place of his body.

    >>> _param("prompt", "input[1]"), _param("messages[0].content", "messages[1]"), _param("dimensions", "input")
    ('input[1]', 'messages[1][0].content', 'dimensions')
    """
    if field in ("prompt", "input"):
        return at
    return at + field.removeprefix("messages") if field.startswith("messages") else field


def _without_empty_answer(messages: list[Message]) -> list[Message]:
    """Drops an empty last assistant message, which vLLM's clients send to close a conversation, as is done here anyway.
    Raises InvalidInput."""
    *others, last = messages
    parts = last.content if isinstance(last.content, list) else []
    empty = last.content == "" or (parts and all(part.type == "text" and not part.text for part in parts))
    if last.role != "assistant" or last.tool_calls or last.thought or not empty or not others:
        why = "an embedding can only continue an empty assistant message"
        raise InvalidInput(why, reason="BAD_FIELD", field="continue_final_message")
    return others


def _written(values: Sequence[float], encoding_format: str) -> bytes:
    """As JSON: numbers, or float32 in base64, little endian."""
    if encoding_format == "float":
        return to_json(list(values))
    return b'"%b"' % base64.b64encode(struct.pack(f"<{len(values)}f", *values))
