"""`POST /v1/responses`, without stored state: a request is a chat's, told otherwise, and so is its answer."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from common.errors import InvalidInput, TwinlensError
from gateway import convert, frame
from gateway.api.chat import ChatRequest, form_of, functions_of, generate_request
from gateway.api.fields import Int, Metadata, Model, kind_of, text_or_list
from gateway.errors import from_validation
from gateway.services import LlmServices
from gateway.speech import Arguments, Call, Piece, Speech, Thought, Words
from gateway.stream import EventStream, event, json_answer
from twinlens.v1 import llm_pb2


class TextPart(Model):
    """A text: the caller's, or one that the model has said."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {"annotations": ([],), "logprobs": ([],)}

    type: Literal["input_text", "output_text"]
    text: str


class ImagePart(Model):
    """A picture."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


Part = Annotated[
    Annotated[TextPart, Tag("$input_text")]
    | Annotated[TextPart, Tag("$output_text")]
    | Annotated[ImagePart, Tag("$input_image")],
    Discriminator(kind_of),
]
Parts = Annotated[list[Part], Field(max_length=4096, fail_fast=True)]
Content = Annotated[Annotated[str, Tag("$text")] | Annotated[Parts, Tag("$list")], Discriminator(text_or_list)]


class Item(Model):
    """One item of the conversation so far; which fields it has is for its `type` to say."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class CallItem(Item):
    """A call that the model has made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ResultItem(Item):
    """What a call has given."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content


class ReasoningText(Model):
    """A part of what the model thought."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Item):
    """What the model thought."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {"summary": ([],)}

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(max_length=4096, fail_fast=True)] | None = None


Items = Annotated[
    Annotated[MessageItem, Tag("$message")]
    | Annotated[CallItem, Tag("$function_call")]
    | Annotated[ResultItem, Tag("$function_call_output")]
    | Annotated[ReasoningItem, Tag("$reasoning")],
    Discriminator(lambda item: kind_of(item) or "$message"),
]


class Function(Model):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Model):
    """The function that it must call."""

    type: Literal["function"]
    name: str


class TextFormat(Model):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextSettings(Model):
    """How the answer is written."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {"verbosity": ("medium",)}

    format: TextFormat | None = None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("$text")] | Annotated[NamedFunction, Tag("$list")],
    Discriminator(text_or_list),
]


class ResponsesRequest(Model):
    """The body of a request."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {
        "store": (False,),
        "background": (False,),
        "truncation": ("disabled",),
        "service_tier": ("auto", "default"),
        "include": ([],),
    }

    model: str | None = None
    input: Annotated[
        Annotated[str, Tag("$text")]
        | Annotated[list[Items], Field(min_length=1, max_length=4096, fail_fast=True), Tag("$list")],
        Discriminator(text_or_list),
    ]
    instructions: str | None = None
    max_output_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    text: TextSettings | None = None
    tools: Annotated[list[Function], Field(max_length=4096, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None


class Responses:
    """Answers requests for responses."""

    def __init__(self, services: LlmServices, seconds: float) -> None:
        self._services = services
        self._seconds = seconds

    async def answer(self, request: Request) -> Response:
        """One request, streamed or whole."""
        call: frame.Call = request.scope["twinlens.call"]
        call.surface = "responses"
        asked = await call.read(ResponsesRequest)
        places: list[int] = []
        try:
            body = ChatRequest.model_validate(_as_chat(asked, places))
        except ValidationError as error:
            raise _of_input(from_validation(error), places) from None
        name = self._services.name(asked.model)
        try:
            message = generate_request(body, call.id)
            form = form_of(self._services, body, name)
        except TwinlensError as error:
            raise _of_input(error, places) from None
        speech = Speech(form, functions_of(body), single=asked.parallel_tool_calls is False)
        output = _Output(asked, call.id, name, speech)
        generation = self._services.generate(message, call.metadata, self._seconds, call.held.release)
        stream = asked.stream
        del message, body, asked
        told = _told(generation, output, places)
        if stream:
            return EventStream(_encoded(told))
        async with aclosing(told) as events:
            async for _ in events:
                pass
        return json_answer(output.response())


def _as_chat(asked: ResponsesRequest, places: list[int]) -> dict[str, Any]:
    """The same as a chat's body; `places` gets, for each message, the index of the item that it is of."""
    fields = asked.model_dump(
        include={"model", "temperature", "top_p", "parallel_tool_calls", "prompt_cache_key"}, exclude_none=True
    )
    fields["messages"] = list(_messages(asked, places))
    if asked.max_output_tokens is not None:
        fields["max_tokens"] = asked.max_output_tokens
    if asked.tools:
        fields["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in asked.tools
        ]
    if isinstance(asked.tool_choice, NamedFunction):
        fields["tool_choice"] = {"type": "function", "function": {"name": asked.tool_choice.name}}
    elif asked.tool_choice is not None:
        fields["tool_choice"] = asked.tool_choice
    form = asked.text.format if asked.text else None
    if form is not None:
        fields["response_format"] = {"type": form.type}
        if form.type == "json_schema":
            if form.schema_ is None:
                raise InvalidInput("the schema is missing", reason="BAD_FIELD", field="text.format.schema")
            fields["response_format"]["json_schema"] = {"name": form.name or "answer", "schema": form.schema_}
    return fields


def _messages(asked: ResponsesRequest, places: list[int]) -> Iterator[dict[str, Any]]:
    """Messages of a chat. What the model thought and called goes with what it said, as one message."""
    if asked.instructions:
        places.append(-1)
        yield {"role": "system", "content": asked.instructions}
    if isinstance(asked.input, str):
        places.append(-1)
        yield {"role": "user", "content": asked.input}
        return
    own: dict[str, Any] = {}
    for place, item in enumerate(asked.input):
        match item:
            case ReasoningItem(content=parts):
                if own:
                    yield own
                own = {"role": "assistant", "reasoning_content": "".join(part.text for part in parts or ())}
                places.append(place)
                continue
            case CallItem():
                if not own:
                    own = {"role": "assistant"}
                    places.append(place)
                function = {"name": item.name, "arguments": item.arguments}
                own.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
                continue
            case MessageItem(role="assistant") if own and "content" not in own and "tool_calls" not in own:
                own["content"] = _content(item.content)
                continue
            case MessageItem(role="assistant"):
                if own:
                    yield own
                own = {"role": "assistant", "content": _content(item.content)}
                places.append(place)
                continue
            case _:
                pass
        if own:
            yield own
            own = {}
        places.append(place)
        if isinstance(item, ResultItem):
            yield {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}
        else:
            yield {"role": item.role, "content": _content(item.content)}
    if own:
        yield own


def _content(given: str | list[TextPart | ImagePart]) -> str | list[dict[str, Any]]:
    if isinstance(given, str):
        return given
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, TextPart)
        else {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}}
        for part in given
    ]


_MESSAGE = re.compile(r"messages\[(\d+)\](.*)")
_CALLED = {"max_tokens": "max_output_tokens", "response_format": "text.format"}


def _of_input(error: TwinlensError, places: list[int]) -> TwinlensError:
    """The same error, by the names that fields have here."""
    if match := _MESSAGE.fullmatch(error.field):
        place = places[int(match[1])]
        return error.at(f"input[{place}]{match[2]}" if place >= 0 else "input")
    return error.at(_CALLED.get(error.field, error.field))


class _Output:
    """What has been said so far, as the items of a response, and what a stream tells of it."""

    def __init__(self, asked: ResponsesRequest, request_id: str, model: str, speech: Speech) -> None:
        self.speech = speech
        self.thought_tokens = 0
        self._items: list[dict[str, Any]] = []
        self._open = ""
        self._finished = llm_pb2.GenerateFinished()
        self._done = False
        form = asked.text.format if asked.text else None
        self._head = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "error": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": model,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
            "tool_choice": asked.tool_choice.model_dump() if isinstance(asked.tool_choice, Model) else "auto",
            "tools": [{"parameters": None, "strict": None, **tool.model_dump()} for tool in asked.tools or ()],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "user": asked.user,
        }
        if isinstance(asked.tool_choice, str):
            self._head["tool_choice"] = asked.tool_choice

    def response(self) -> dict[str, Any]:
        """The response as it is now."""
        cut = self._finished.reason == llm_pb2.FINISH_REASON_LENGTH
        status = ("incomplete" if cut else "completed") if self._done else "in_progress"
        counted = convert.usage([[self._finished]])
        usage = {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": counted["prompt_tokens_details"],
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.thought_tokens},
            "total_tokens": counted["total_tokens"],
        }
        return {
            **self._head,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if self._done and cut else None,
            "output": [dict(item) for item in self._items],
            "usage": usage if self._done else None,
        }

    def add(self, pieces: list[Piece]) -> Iterator[dict[str, Any]]:
        """Takes more of it in; what a stream says of it."""
        for piece in pieces:
            match piece:
                case Words(text):
                    yield from self._enter("message")
                    self._items[-1]["content"][0]["text"] += text
                    yield self._about("response.output_text.delta", content_index=0, delta=text, logprobs=[])
                case Thought(text):
                    yield from self._enter("reasoning")
                    self._items[-1]["content"][0]["text"] += text
                    yield self._about("response.reasoning_text.delta", content_index=0, delta=text)
                case Call(name):
                    yield from self._enter("function_call", name)
                case Arguments(text):
                    self._items[-1]["arguments"] += text
                    yield self._about("response.function_call_arguments.delta", delta=text)

    def finish(self, finished: llm_pb2.GenerateFinished) -> Iterator[dict[str, Any]]:
        """It is complete."""
        yield from self.add(self.speech.end())
        self._finished = finished
        cut = finished.reason == llm_pb2.FINISH_REASON_LENGTH
        yield from self._leave("incomplete" if cut else "completed")
        self._done = True
        kind = "response.incomplete" if cut else "response.completed"
        yield {"type": kind, "response": self.response()}

    def _about(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, **fields}

    def _enter(self, kind: str, name: str = "") -> Iterator[dict[str, Any]]:
        """Begins an item of this kind; words and thoughts go on in the one that is open."""
        if self._open == kind and kind != "function_call":
            return
        yield from self._leave("completed")
        self._open = kind
        item: dict[str, Any] = {"type": kind, "status": "in_progress"}
        match kind:
            case "message":
                part = {"type": "output_text", "text": "", "annotations": []}
                item |= {"id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "content": [part]}
            case "reasoning":
                part = {"type": "reasoning_text", "text": ""}
                item |= {"id": f"rs_{uuid.uuid4().hex}", "summary": [], "content": [part]}
            case _:
                item |= {"id": f"fc_{uuid.uuid4().hex}", "call_id": f"call_{uuid.uuid4().hex[:24]}"}
                item |= {"name": name, "arguments": ""}
        self._items.append(item)
        empty = {**item, "content": []} if "content" in item else dict(item)
        yield {"type": "response.output_item.added", "output_index": len(self._items) - 1, "item": empty}
        if kind != "function_call":
            yield self._about("response.content_part.added", content_index=0, part=dict(item["content"][0]))

    def _leave(self, status: str) -> Iterator[dict[str, Any]]:
        """Ends the item that is open."""
        if not self._open:
            return
        item, kind, self._open = self._items[-1], self._open, ""
        item["status"] = status
        if kind == "function_call":
            yield self._about("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            part = dict(item["content"][0])
            if kind == "message":
                yield self._about("response.output_text.done", content_index=0, text=part["text"], logprobs=[])
            else:
                yield self._about("response.reasoning_text.done", content_index=0, text=part["text"])
            yield self._about("response.content_part.done", content_index=0, part=part)
        yield {
            "type": "response.output_item.done",
            "output_index": len(self._items) - 1,
            "item": json.loads(json.dumps(item)),
        }


async def _told(
    generation: AsyncGenerator[llm_pb2.GenerateResponse], output: _Output, places: list[int]
) -> AsyncGenerator[dict[str, Any]]:
    """What a stream tells, in order."""
    try:
        async with aclosing(generation) as events:
            async for said in events:
                match said.WhichOneof("event"):
                    case "started":
                        output.speech.begin(thinking=said.started.thinking)
                        yield {"type": "response.created", "response": output.response()}
                        yield {"type": "response.in_progress", "response": output.response()}
                    case "delta":
                        for each in output.add(output.speech.feed(said.delta.text)):
                            yield each
                        if output.speech.thinks:
                            output.thought_tokens += len(said.delta.token_ids)
                    case "finished":
                        for each in output.finish(said.finished):
                            yield each
                    case _:  # an event of a newer service
                        continue
    except TwinlensError as error:
        raise _of_input(error, places) from None


async def _encoded(told: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[bytes]:
    number = 0
    async with aclosing(told) as events:
        async for each in events:
            yield event({**each, "sequence_number": number}, each["type"])
            number += 1
