"""The body of `POST /v1/responses`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from gateway.api.chat_request import TemplateSettings
from gateway.api.fields import (
    Count,
    Effort,
    Int,
    MediaSettings,
    Metadata,
    Model,
    RequestFields,
    StructuredOutputs,
    Texts,
    kind_of,
    text_or_list,
)
from gateway.errors import NOT_STORED
from gateway.sealed_reasoning import opened


class TextPart(Model):
    """A text: the caller's, or one that the model has said. What else answers have beside it is ignored."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class RefusalPart(Model):
    """A refusal in place of an answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """It, as a text like any other."""
        return self.refusal


class ImagePart(Model):
    """A picture."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


Part = Annotated[
    Annotated[TextPart, Tag("$input_text")]
    | Annotated[TextPart, Tag("$output_text")]
    | Annotated[RefusalPart, Tag("$refusal")]
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
    """A message. Its `phase`, which other servers give beside answers, has no place in chat templates."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    phase: str | None = None


class CallItem(Item):
    """A call that the model has made. Its function's name is enough, since no other namespace has one of that name."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class ResultItem(Item):
    """The result of a call, which `call_id` says; its function may be named as well."""

    type: Literal["function_call_output"]
    call_id: str
    name: str | None = None
    namespace: str | None = None
    output: Content


class ReasoningText(Model):
    """A part of the model's reasoning. Open WebUI keeps that of chats as any other text."""

    type: Literal["reasoning_text", "output_text"]
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
    encrypted_content: Annotated[str, AfterValidator(opened)] | None = None

    @property
    def thought(self) -> str:
        """It, from the place that has the most of it."""
        if self.content or not self.encrypted_content:
            return "".join(part.text for part in self.content or self.summary or ())
        return self.encrypted_content


def _whole(item: Any) -> Any:
    if isinstance(item, dict) and item.get("type") == "item_reference":
        raise PydanticCustomError(NOT_STORED, "items are not stored: send them whole, as clients do with store: false")
    return item


Items = Annotated[
    Annotated[MessageItem, Tag("$message")]
    | Annotated[CallItem, Tag("$function_call")]
    | Annotated[ResultItem, Tag("$function_call_output")]
    | Annotated[ReasoningItem, Tag("$reasoning")],
    Discriminator(lambda item: kind_of(item) or "$message"),
    BeforeValidator(_whole),
]


class Function(Model):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Namespace(Model):
    """Functions that the caller has as a group."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Annotated[
        list[Annotated[Annotated[Function, Tag("$function")], Discriminator(kind_of)]],
        Field(max_length=4096, fail_fast=True),
    ]


Tools = Annotated[
    list[
        Annotated[
            Annotated[Function, Tag("$function")] | Annotated[Namespace, Tag("$namespace")], Discriminator(kind_of)
        ]
    ],
    Field(max_length=4096, fail_fast=True),
]


@dataclass(frozen=True, slots=True)
class OfferedFunction:
    """A function, its place in the request, and the group that it is in."""

    function: Function
    place: str
    group: Namespace | None = None


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
    """How much the model thinks, and whether it is told as a summary, which is all of it."""

    effort: Effort | None = None
    summary: Literal["auto", "detailed"] | None = None
    generate_summary: Literal["auto", "detailed"] | None = None

    @model_validator(mode="after")
    def _one_word_for_the_summary(self) -> Reasoning:
        if None not in (given := (self.summary, self.generate_summary)) and given[0] != given[1]:
            raise ValueError("summary and generate_summary are aliases and have different values")
        return self


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


class InputTokensRequest(Model):
    """The body of a token count: the part of a request that becomes its prompt."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {"truncation": ("disabled",)}

    model: str | None = None
    input: Annotated[
        Annotated[str, Tag("$text")]
        | Annotated[list[Items], Field(min_length=1, max_length=4096, fail_fast=True), Tag("$list")],
        Discriminator(text_or_list),
    ]
    instructions: str | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    mm_processor_kwargs: MediaSettings | None = None
    chat_template_kwargs: TemplateSettings | None = None
    cache_salt: str | None = None

    @property
    def functions(self) -> list[OfferedFunction]:
        """All functions, those of groups as well."""
        found: list[OfferedFunction] = []
        for number, tool in enumerate(self.tools or ()):
            place = f"tools[{number}]"
            match tool:
                case Function():
                    found.append(OfferedFunction(tool, place))
                case Namespace(tools=own):
                    found += [OfferedFunction(each, f"{place}.tools[{at}]", tool) for at, each in enumerate(own)]
        return found

    @model_validator(mode="after")
    def _names_are_unique_across_groups(self) -> InputTokensRequest:
        groups: dict[str, Namespace | None] = {}
        for each in self.functions:
            if groups.setdefault(each.function.name, each.group) is not each.group:
                raise ValueError("functions of different namespaces have the same name")
        return self


class ResponsesRequest(InputTokensRequest, RequestFields):
    """The body of a request."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {
        "store": (False,),
        "background": (False,),
        "truncation": ("disabled",),
        "service_tier": ("auto", "default"),
        "prompt_cache_retention": ("in_memory", "in-memory"),
    }

    include: (
        Annotated[
            list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]],
            Field(max_length=16, fail_fast=True),
        ]
        | None
    ) = None
    top_logprobs: Int | None = None
    truncation: Literal["auto"] | None = None
    max_output_tokens: Int | None = None
    stream_options: StreamSettings | None = None
    prompt_cache_key: str | None = None
    stop: (
        Annotated[Annotated[str, Tag("$text")] | Annotated[Texts, Tag("$list")], Discriminator(text_or_list)] | None
    ) = None
    ignore_eos: bool | None = None
    thinking_token_budget: Count | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=4096)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    metadata: Metadata | None = None
    client_metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None

    @property
    def with_logprobs(self) -> bool:
        """It is wanted how likely tokens were."""
        return "message.output_text.logprobs" in (self.include or ())

    @property
    def with_sealed_reasoning(self) -> bool:
        """Reasoning is wanted in a form that callers send back without reading it."""
        return "reasoning.encrypted_content" in (self.include or ())

    @property
    def summary(self) -> str | None:
        """The kind of summary in whose place reasoning is wanted."""
        asked = self.reasoning or Reasoning()
        return asked.summary or asked.generate_summary

    @model_validator(mode="after")
    def _fields_agree(self) -> ResponsesRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options need stream: true")
        if self.top_logprobs and not self.with_logprobs:
            raise ValueError("top_logprobs need include: message.output_text.logprobs")
        return self
