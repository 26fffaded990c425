"""`POST /v1/chat/completions`: what it takes and how it answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from starlette.requests import Request
from starlette.responses import Response

from common.errors import InvalidInput
from gateway import convert, frame
from gateway.api.fields import Int, MediaSettings, Metadata, Model, Sampling, kind_of, text_or_list
from gateway.services import LlmServices
from gateway.speech import Arguments, Call, Form, Piece, Speech, Thought, Words
from gateway.stream import DONE, EventStream, event, json_answer
from twinlens.v1 import llm_pb2


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


class CalledFunction(Model):
    """What a call names, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(Model):
    """A call that the model has made; `index` is what streams have."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Int | None = None


class Message(Model):
    """One message of a conversation."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {"tool_calls": ([],), "annotations": ([],)}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=4096, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class Function(Model):
    """A function that the model may call; `parameters` is a JSON Schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Model):
    """What the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Model):
    """A function by its name."""

    name: str


class NamedTool(Model):
    """The function that the model must call."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("$text")] | Annotated[NamedTool, Tag("$list")],
    Discriminator(text_or_list),
]


class TemplateSettings(Model):
    """vLLM's `chat_template_kwargs`."""

    enable_thinking: bool | None = None


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
        "function_call": ("none", "auto"),
        "parallel_tool_calls": (True,),
    }

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=4096, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateSettings | None = None
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
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tool_choice names tools, and there are none")
        return self


@dataclass(slots=True)
class _Choice:
    """What one choice has said so far."""

    speech: Speech
    words: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finished: llm_pb2.GenerateFinished = field(default_factory=llm_pb2.GenerateFinished)

    def add(self, piece: Piece) -> dict[str, Any]:
        """Takes more of it in; returns what a stream says of it."""
        match piece:
            case Words(text):
                self.words.append(text)
                return {"content": text}
            case Thought(text):
                self.thoughts.append(text)
                return {"reasoning_content": text}
            case Call(name):
                call = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
                self.calls.append({**call, "function": {"name": name, "arguments": ""}})
                begun = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": len(self.calls) - 1, **call, "function": begun}]}
            case Arguments(text):
                function = self.calls[-1]["function"]
                function["arguments"] += text
                return {"tool_calls": [{"index": len(self.calls) - 1, "function": {"arguments": text}}]}

    def finish(self) -> dict[str, Any]:
        """Why it ended."""
        ended = convert.finish(self.finished)
        if self.calls and ended["finish_reason"] == "stop":
            ended["finish_reason"] = "tool_calls"
        return ended

    def message(self) -> dict[str, Any]:
        """All of it."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.words), "refusal": None}
        if self.thoughts:
            message["reasoning_content"] = "".join(self.thoughts)
        if self.calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = self.calls
        return message


@dataclass(frozen=True, slots=True)
class _Asked:
    """What of a request matters to its answer."""

    head: dict[str, Any]
    n: int
    scored: bool
    with_usage: bool
    form: Form
    functions: dict[str, dict[str, Any]]
    single: bool

    def choice(self, started: llm_pb2.GenerateStarted) -> _Choice:
        """One that has said nothing yet."""
        return _Choice(Speech(self.form, self.functions, single=self.single, thinking=started.thinking))


class Chat:
    """Answers requests for chat completions."""

    def __init__(self, services: LlmServices, seconds: float) -> None:
        self._services = services
        self._seconds = seconds

    async def answer(self, request: Request) -> Response:
        """One request, streamed or whole."""
        call: frame.Call = request.scope["twinlens.call"]
        call.surface = "chat"
        body = await call.read(ChatRequest)
        message = generate_request(body, call.id)
        name = self._services.name(body.model)
        asked = _Asked(
            {"id": f"chatcmpl-{call.id}", "created": int(time.time()), "model": name},
            body.n or 1,
            bool(body.logprobs),
            body.stream_options is not None and bool(body.stream_options.include_usage),
            form_of(self._services, body, name),
            functions_of(body),
            body.parallel_tool_calls is False,
        )
        events = self._services.generate(message, call.metadata, self._seconds, call.held.release)
        stream = body.stream
        del message, body
        return EventStream(_chunks(events, asked)) if stream else json_answer(await _whole(events, asked))


_FORMS: dict[int, Form] = {llm_pb2.TOOL_FORMAT_JSON: Form.JSON, llm_pb2.TOOL_FORMAT_XML: Form.XML}


def form_of(services: LlmServices, body: ChatRequest, model: str) -> Form:
    """How calls are written: as the model does by itself, unless they are what it must answer."""
    if not offered(body):
        return Form.NONE
    if isinstance(body.tool_choice, NamedTool):
        return Form.ARGUMENTS
    if body.tool_choice == "required":
        return Form.LIST
    info = services.models.get(model)
    form = _FORMS.get(info.tool_format) if info is not None else Form.JSON  # nobody is there to be asked
    if form is None:
        raise InvalidInput("how this model writes calls is not known", reason="NO_TOOLS", field="tools")
    return form


def functions_of(body: ChatRequest) -> dict[str, dict[str, Any]]:
    """The schemas of what the model may call, by name."""
    return {tool.function.name: tool.function.parameters or {} for tool in offered(body)}


def offered(body: ChatRequest) -> list[Tool]:
    """What the model may call; it is not told of what it may not."""
    tools = [] if body.tool_choice == "none" else body.tools or []
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        tools = [tool for tool in tools if tool.function.name == name]
        if not tools:
            raise InvalidInput("there is no tool of that name", reason="BAD_FIELD", field="tool_choice.function.name")
    return tools


def generate_request(asked: ChatRequest, request_id: str) -> llm_pb2.GenerateRequest:
    """What the LLM service is asked. Raises InvalidInput."""
    sampling = convert.sampling(asked, asked.max_completion_tokens)
    if asked.logprobs:
        sampling.logprobs = asked.top_logprobs or 0
    if asked.response_format is not None:
        convert.set_response_format(sampling, asked.response_format)
    tools = offered(asked)
    if isinstance(asked.tool_choice, NamedTool):
        convert.set_form(sampling, "json_schema", convert.schema(tools[0].function.parameters or {"type": "object"}))
    elif asked.tool_choice == "required":
        most = 1 if asked.parallel_tool_calls is False else None
        convert.set_form(sampling, "json_schema", convert.calls_schema([tool.function for tool in tools], most))
    settings = asked.mm_processor_kwargs or MediaSettings()
    chat = llm_pb2.ChatInput(
        messages=[convert.message(each, settings, f"messages[{number}]") for number, each in enumerate(asked.messages)],
        tools=[convert.tool(tool.function) for tool in tools],
    )
    if asked.chat_template_kwargs is not None and asked.chat_template_kwargs.enable_thinking is not None:
        chat.thinking = asked.chat_template_kwargs.enable_thinking
    return convert.generate_request(asked, sampling, request_id, chat=chat, session_id=asked.prompt_cache_key or "")


Events = AsyncGenerator[llm_pb2.GenerateResponse]


async def _chunks(events: Events, asked: _Asked) -> AsyncGenerator[bytes]:
    head = {**asked.head, "object": "chat.completion.chunk"}
    more = {"usage": None} if asked.with_usage else {}
    choices: list[_Choice] = []

    def chunk(index: int, delta: dict[str, Any], **rest: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **rest}
        return event({**head, "choices": [choice], **more})

    async with aclosing(events) as each:
        async for said in each:
            match said.WhichOneof("event"):
                case "started":
                    choices = [asked.choice(said.started) for _ in range(asked.n)]
                    for index in range(asked.n):
                        yield chunk(index, {"role": "assistant", "content": ""})
                case "delta":
                    index, choice = said.delta.index, choices[said.delta.index]
                    deltas = [choice.add(piece) for piece in choice.speech.feed(said.delta.text)]
                    scores = {}
                    if said.delta.logprobs and asked.scored:
                        deltas = deltas or [{"content": ""}]
                        scores = {"logprobs": {"content": convert.chat_logprobs(said.delta.logprobs)}}
                    for delta in deltas:
                        yield chunk(index, delta, **scores)
                        scores = {}
                case "finished":
                    index, choice = said.finished.index, choices[said.finished.index]
                    choice.finished = said.finished
                    for piece in choice.speech.end():
                        yield chunk(index, choice.add(piece))
                    yield chunk(index, {}, **choice.finish())
                case _:  # an event of a newer service
                    continue
    if asked.with_usage:
        usage = convert.usage([[choice.finished for choice in choices]])
        yield event({**head, "choices": [], "usage": usage})
    yield DONE


async def _whole(events: Events, asked: _Asked) -> dict[str, Any]:
    choices: list[_Choice] = []
    async with aclosing(events) as each:
        async for said in each:
            match said.WhichOneof("event"):
                case "started":
                    choices = [asked.choice(said.started) for _ in range(asked.n)]
                case "delta":
                    choice = choices[said.delta.index]
                    for piece in choice.speech.feed(said.delta.text):
                        choice.add(piece)
                    choice.logprobs += convert.chat_logprobs(said.delta.logprobs)
                case "finished":
                    choice = choices[said.finished.index]
                    choice.finished = said.finished
                    for piece in choice.speech.end():
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
            }
            for index, choice in enumerate(choices)
        ],
        "usage": convert.usage([[choice.finished for choice in choices]]),
    }
