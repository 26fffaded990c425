"""The bodies of `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from gateway.api.fields import Count, Int, Model, Texts, Thinking, kind_of, text_or_list

_EAGER = "fine-grained-tool-streaming-2025-05-14"
_KEEPS_THOUGHTS = {"type": "clear_thinking_20251015", "keep": "all"}


class Block(Model):
    """A block of a message. `cache_control` is taken: prefixes are cached by themselves."""

    cache_control: dict[str, Any] | None = None


class TextBlock(Block):
    """A text: the caller's, or one that the model has said."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {"citations": ([],)}

    type: Literal["text"]
    text: str


class Base64Source(Model):
    """A picture's file, in base64."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str

    @property
    def address(self) -> str:
        """As an address."""
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(Model):
    """A picture's address."""

    type: Literal["url"]
    url: str

    @property
    def address(self) -> str:
        """It is one."""
        return self.url


class ImageBlock(Block):
    """A picture."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {
        "transformations": ({}, {"oversized_image": "downsize"}),
    }

    type: Literal["image"]
    source: Annotated[
        Annotated[Base64Source, Tag("$base64")] | Annotated[UrlSource, Tag("$url")], Discriminator(kind_of)
    ]


class ToolUseBlock(Block):
    """A call that the model has made."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {"caller": ({"type": "direct"},)}

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


_ResultParts = Annotated[
    list[
        Annotated[
            Annotated[TextBlock, Tag("$text")] | Annotated[ImageBlock, Tag("$image")],
            Discriminator(kind_of),
        ]
    ],
    Field(max_length=4096, fail_fast=True),
]


class ToolResultBlock(Block):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: (
        Annotated[Annotated[str, Tag("$text")] | Annotated[_ResultParts, Tag("$list")], Discriminator(text_or_list)]
        | None
    ) = None
    is_error: bool | None = None


class ThinkingBlock(Block):
    """The model's reasoning. Its signature is whatever the answer had, and is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("$text")]
    | Annotated[ImageBlock, Tag("$image")]
    | Annotated[ToolUseBlock, Tag("$tool_use")]
    | Annotated[ToolResultBlock, Tag("$tool_result")]
    | Annotated[ThinkingBlock, Tag("$thinking")],
    Discriminator(kind_of),
]
Blocks = Annotated[list[ContentBlock], Field(max_length=4096, fail_fast=True)]


class Turn(Model):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Annotated[str, Tag("$text")] | Annotated[Blocks, Tag("$list")], Discriminator(text_or_list)]


def _of_an_object(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type") != "object":
        raise ValueError("the schema of a tool's input must have the type object")
    return schema


class CustomTool(Block):
    """A function that the model may call. Its input is streamed as it is made if `eager_input_streaming` is true, or if
    that is left out and the header says so."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {
        "allowed_callers": (["direct"],),
        "defer_loading": (False,),
        "input_examples": ([],),
    }

    type: Literal["custom"] | None = None
    name: str
    input_schema: Annotated[dict[str, Any], AfterValidator(_of_an_object)]
    description: str | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None


Tool = Annotated[Annotated[CustomTool, Tag("$custom")], Discriminator(lambda tool: kind_of(tool) or "$custom")]


class FreeChoice(Model):
    """The model may call, must not, or must call any function."""

    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = None


class NamedChoice(Model):
    """The tool that the model must call."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class NoTool(Model):
    """The model must not call."""

    type: Literal["none"]


ToolChoice = Annotated[
    Annotated[FreeChoice, Tag("$auto")]
    | Annotated[FreeChoice, Tag("$any")]
    | Annotated[NamedChoice, Tag("$tool")]
    | Annotated[NoTool, Tag("$none")],
    Discriminator(kind_of),
]


class JsonFormat(Model):
    """A schema that the answer must follow."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Model):
    """How the answer is written. An `effort` that is `high` is by Anthropic's word the same as no `effort`."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {"effort": ("high",)}

    format: JsonFormat | None = None
    effort: Literal["low", "medium", "xhigh", "max"] | None = None


class CountRequest(Model):
    """The body of a token count: the part of a request that becomes its prompt."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {
        "speed": ("standard",),
        "context_management": ({"edits": []}, {"edits": [_KEEPS_THOUGHTS]}),
        "mcp_servers": ([],),
    }

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=4096, fail_fast=True)]
    system: (
        Annotated[
            Annotated[str, Tag("$text")]
            | Annotated[list[TextBlock], Field(max_length=4096, fail_fast=True), Tag("$list")],
            Discriminator(text_or_list),
        ]
        | None
    ) = None
    tools: Annotated[list[Tool], Field(max_length=4096, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    user_profile_id: str | None = None
    cache_salt: str | None = None


class MessagesRequest(CountRequest):
    """The body of a request for an answer."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {
        **CountRequest.without_effect,
        "service_tier": ("auto", "standard_only"),
    }

    max_tokens: Int
    stop_sequences: Texts | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    stream: bool | None = None
    metadata: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    priority: Int | None = None
    max_handovers: Count | None = None

    def eager_tools(self, betas: str) -> frozenset[str]:
        """Tools whose input is streamed before it is complete; `betas` is the header `anthropic-beta`."""
        by_default = _EAGER in map(str.strip, betas.split(","))
        given = {tool.name: tool.eager_input_streaming for tool in self.tools or ()}
        return frozenset(name for name, eager in given.items() if (by_default if eager is None else eager))
