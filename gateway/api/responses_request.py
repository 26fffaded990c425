"""The body of `POST /v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from gateway.api.fields import Count, Effort, Int, Metadata, Model, kind_of, text_or_list


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
    """One item of the conversation so far; its `type` determines its fields."""

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
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content


class ReasoningText(Model):
    """A part of the model's reasoning."""

    type: Literal["reasoning_text"]
    text: str


class SummaryText(Model):
    """A part of a summary of that."""

    type: Literal["summary_text"]
    text: str


class ReasoningItem(Item):
    """The model's reasoning, or, from other servers, only a summary."""

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryText], Field(max_length=4096, fail_fast=True)] | None = None
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


class Reasoning(Model):
    """How much the model thinks. Reasoning is returned in full, which is a valid `auto` summary."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {"summary": ("auto",), "generate_summary": ("auto",)}

    effort: Effort | None = None


class AllowedTools(Model):
    """Some of the functions, one of which the model may call, or must."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=4096, fail_fast=True)]


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("$text")]
    | Annotated[NamedFunction, Tag("$function")]
    | Annotated[AllowedTools, Tag("$allowed_tools")],
    Discriminator(lambda value: "$text" if isinstance(value, str) else kind_of(value)),
]


class StreamSettings(Model):
    """Options of a stream. Usage is reported at its end whether asked for, as by some clients, or not."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {
        "include_obfuscation": (False,),
        "include_usage": (True,),
        "continuous_usage_stats": (False,),
    }


class ResponsesRequest(Model):
    """The body of a request."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {
        "store": (False,),
        "background": (False,),
        "truncation": ("disabled",),
        "service_tier": ("auto", "default"),
        "prompt_cache_retention": ("in_memory", "in-memory"),
        "include": ([], ["reasoning.encrypted_content"]),  # reasoning is told as it is, and can be sent back so
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
    stream_options: StreamSettings | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[Function], Field(max_length=4096, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    max_handovers: Count | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None

    @model_validator(mode="after")
    def _stream_options_go_with_a_stream(self) -> ResponsesRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options need stream: true")
        return self
