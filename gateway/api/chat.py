"""`POST /v1/chat/completions`: what it takes and how it answers."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from starlette.requests import Request
from starlette.responses import Response

from gateway import convert
from gateway.api.fields import Int, MediaSettings, Metadata, Model, Sampling, kind_of, text_or_list
from gateway.frame import Call
from gateway.services import LlmServices
from gateway.stream import DONE, EventStream, event, json_answer
from twinlens.v1 import llm_pb2

Chunks = AsyncGenerator[bytes]


class TextPart(Model):
    """A text."""

    type: Literal["text"]
    text: str


class ImageUrl(Model):
    """A picture's address."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImagePart(Model):
    """A picture."""

    type: Literal["image_url"]
    image_url: ImageUrl


class VideoUrl(Model):
    """A video's address."""

    url: str


class VideoPart(Model):
    """A video."""

    type: Literal["video_url"]
    video_url: VideoUrl


class Audio(Model):
    """A clip, in base64."""

    data: str
    format: Literal["wav", "mp3", "flac", "ogg"]


class AudioPart(Model):
    """A clip."""

    type: Literal["input_audio"]
    input_audio: Audio


Part = Annotated[
    Annotated[TextPart, Tag("$text")]
    | Annotated[ImagePart, Tag("$image_url")]
    | Annotated[VideoPart, Tag("$video_url")]
    | Annotated[AudioPart, Tag("$input_audio")],
    Discriminator(kind_of),
]
Parts = Annotated[list[Part], Field(max_length=4096, fail_fast=True)]
Content = Annotated[Annotated[str, Tag("$text")] | Annotated[Parts, Tag("$list")], Discriminator(text_or_list)]


class Message(Model):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None


class JsonSchema(Model):
    """A schema that the answer must follow."""

    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Model):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(Sampling):
    """The body of a request."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {
        "store": (False,),
        "modalities": (["text"],),
        "service_tier": ("auto", "default"),
        "verbosity": ("medium",),
        "tools": ([],),
        "functions": ([],),
        "tool_choice": ("none", "auto"),
        "function_call": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "reasoning_effort": ("none",),
    }

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    response_format: ResponseFormat | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    metadata: Metadata | None = None
    mm_processor_kwargs: MediaSettings | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs go with logprobs alone")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("give max_completion_tokens or max_tokens, not both")
        return self


@dataclass(slots=True)
class _Choice:
    """What one choice has said so far."""

    text: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finished: llm_pb2.GenerateFinished = field(default_factory=llm_pb2.GenerateFinished)


class Chat:
    """Answers requests for chat completions."""

    def __init__(self, services: LlmServices, seconds: float) -> None:
        self._services = services
        self._seconds = seconds

    async def answer(self, request: Request) -> Response:
        """One request, streamed or whole."""
        call: Call = request.scope["twinlens.call"]
        call.surface = "chat"
        asked = await call.read(ChatRequest)
        message = _generate_request(asked, call.id)
        head = {"id": f"chatcmpl-{call.id}", "created": int(time.time()), "model": self._services.name(asked.model)}
        events = self._services.generate(message, call.metadata, self._seconds, call.held.release)
        del message
        if asked.stream:
            usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
            return EventStream(_chunks(events, head, asked.n or 1, with_usage=usage, scored=bool(asked.logprobs)))
        return json_answer(await _whole(events, head, scored=bool(asked.logprobs)))


def _generate_request(asked: ChatRequest, request_id: str) -> llm_pb2.GenerateRequest:
    sampling = convert.sampling(asked, asked.max_completion_tokens)
    if asked.logprobs:
        sampling.logprobs = asked.top_logprobs or 0
    if asked.response_format is not None:
        convert.set_response_format(sampling, asked.response_format)
    chat = llm_pb2.ChatInput(
        messages=[convert.message(each, asked.mm_processor_kwargs or MediaSettings()) for each in asked.messages]
    )
    return convert.generate_request(asked, sampling, request_id, chat=chat, session_id=asked.prompt_cache_key or "")


async def _chunks(
    events: AsyncGenerator[llm_pb2.GenerateResponse],
    head: dict[str, Any],
    n: int,
    *,
    with_usage: bool,
    scored: bool,
) -> Chunks:
    head = {**head, "object": "chat.completion.chunk"}
    more = {"usage": None} if with_usage else {}
    finished: list[llm_pb2.GenerateFinished] = []

    def chunk(index: int, delta: dict[str, Any], **rest: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **rest}
        return event({**head, "choices": [choice], **more})

    async with aclosing(events) as each:
        async for said in each:
            match said.WhichOneof("event"):
                case "started":
                    for index in range(n):
                        yield chunk(index, {"role": "assistant", "content": ""})
                case "delta":
                    delta = said.delta
                    logprobs = {"content": convert.chat_logprobs(delta.logprobs)} if scored else None
                    if delta.text or delta.logprobs:
                        yield chunk(delta.index, {"content": delta.text}, logprobs=logprobs)
                case "finished":
                    finished.append(said.finished)
                    yield chunk(said.finished.index, {}, **convert.finish(said.finished))
                case _:  # an event of a newer service
                    continue
    if with_usage:
        yield event({**head, "choices": [], "usage": convert.usage([finished])})
    yield DONE


async def _whole(
    events: AsyncGenerator[llm_pb2.GenerateResponse], head: dict[str, Any], *, scored: bool
) -> dict[str, Any]:
    choices: dict[int, _Choice] = {}
    async with aclosing(events) as each:
        async for said in each:
            match said.WhichOneof("event"):
                case "delta":
                    choice = choices.setdefault(said.delta.index, _Choice())
                    choice.text.append(said.delta.text)
                    choice.logprobs += convert.chat_logprobs(said.delta.logprobs)
                case "finished":
                    choices.setdefault(said.finished.index, _Choice()).finished = said.finished
                case _:
                    continue
    return {
        **head,
        "object": "chat.completion",
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
                "logprobs": {"content": choice.logprobs, "refusal": None} if scored else None,
                **convert.finish(choice.finished),
            }
            for index, choice in sorted(choices.items())
        ],
        "usage": convert.usage([[choice.finished for choice in choices.values()]]),
    }
