"""Fields shared by several surfaces: sampling, media, and fields that are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

Int = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
Count = Annotated[int, Field(ge=0, lt=1 << 31)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 32)]], Field(max_length=1 << 20, fail_fast=True)]
Texts = Annotated[list[str], Field(max_length=4096, fail_fast=True)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Metadata = Annotated[dict[str, str], Field(max_length=64)]


def kind_of(value: Any) -> str | None:
    """A part's or tool's alternative by its `type`, as a tag."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"${kind}" if isinstance(kind, str) else None


def text_or_list(value: Any) -> str:
    """The alternative of a field that is a text or a list."""
    return "$text" if isinstance(value, str) else "$list"


def shape_of(value: Any) -> str:
    """The alternative of a field that has one prompt or several, each a text or token ids."""
    first = value[0] if isinstance(value, list) and value else None
    match value, first:
        case str(), _:
            return "$text"
        case _, int():
            return "$tokens"
        case _, list():
            return "$token_lists"
        case _:
            return "$texts"


Prompt = Annotated[
    Annotated[str, Tag("$text")]
    | Annotated[Texts, Tag("$texts")]
    | Annotated[Tokens, Tag("$tokens")]
    | Annotated[list[Tokens], Field(max_length=4096, fail_fast=True), Tag("$token_lists")],
    Discriminator(shape_of),
]


class Model(BaseModel):
    """A JSON object with exact types, no NaN, and no unknown fields. A null field counts as absent, and so does one
    with a value listed in `without_effect`, which asks for the default."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)
    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_what_is_without_effect(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {
            name: value
            for name, value in data.items()
            if value is not None and value not in cls.without_effect.get(name, ())
        }


class StructuredOutputs(Model):
    """vLLM's field for the form of an answer."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None


class MediaSettings(Model):
    """vLLM's `mm_processor_kwargs`: how media are preprocessed."""

    min_pixels: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    max_pixels: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    fps: float | None = None
    max_frames: Int | None = None
    video_pruning_rate: float | None = None
    with_sound: bool | None = None
    use_audio_in_video: bool | None = None

    @model_validator(mode="after")
    def _one_word_for_sound(self) -> MediaSettings:
        """vLLM calls it otherwise."""
        if None not in (self.with_sound, self.use_audio_in_video) and self.with_sound != self.use_audio_in_video:
            raise ValueError("with_sound and use_audio_in_video are aliases and have different values")
        return self

    @property
    def sound(self) -> bool | None:
        """Whether a video's sound is used, by either name."""
        return self.use_audio_in_video if self.with_sound is None else self.with_sound

    @property
    def of_videos(self) -> dict[str, Any]:
        """By the names of `MediaOptions`."""
        return self.model_dump(exclude={"use_audio_in_video"}) | {"with_sound": self.sound}


class VideoLoading(Model):
    """Which frames of a video are used."""

    fps: float | None = None
    num_frames: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None


class MediaLoading(Model):
    """vLLM's `media_io_kwargs`: how media are read, by their kind."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {"image": ({},), "audio": ({},)}

    video: VideoLoading | None = None


VLLM_DEFAULTS: Final[dict[str, tuple[Any, ...]]] = {
    "add_special_tokens": (False,),
    "spaces_between_special_tokens": (True,),
    "length_penalty": (1.0,),
    "use_beam_search": (False,),
}
"""Fields of vLLM's that are not served, with the values that some clients send along and that change nothing."""


class StreamOptions(Model):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


RequestId = Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,128}$")]


class IdFields(Model):
    """A request that may be named in its body, by vLLM's or SGLang's field."""

    request_id: RequestId | None = None
    rid: RequestId | None = None

    @model_validator(mode="after")
    def _one_word_for_its_name(self) -> IdFields:
        if None not in (self.request_id, self.rid) and self.request_id != self.rid:
            raise ValueError("request_id and rid are aliases and have different values")
        return self

    @property
    def stated_id(self) -> str:
        """The name; empty if it is not named in its body."""
        return self.request_id or self.rid or ""


class Thinking(Model):
    """Whether the model thinks before it answers, and for how long; `adaptive`: as the chat template has it."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {"display": ("summarized",)}

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None

    @model_validator(mode="after")
    def _a_budget_is_for_thinking(self) -> Thinking:
        if self.budget_tokens is not None and self.type != "enabled":
            raise ValueError("budget_tokens goes with the type enabled")
        return self


class RequestFields(IdFields):
    """Fields of every request for an answer: the model, sampling, and the user."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    seed: Seed | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stream: bool | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: Int | None = None
    max_handovers: Count | None = None


class JsonSchema(Model):
    """A schema that the answer must follow."""

    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Model):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: dict[str, Any] | None = None
    structures: Annotated[list[dict[str, Any]], Field(max_length=4096, fail_fast=True)] | None = None
    triggers: Texts | None = None

    @property
    def structural_tag(self) -> dict[str, Any]:
        """The structural tag that it states."""
        given = {"format": self.format, "structures": self.structures, "triggers": self.triggers}
        return {name: value for name, value in given.items() if value is not None}

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> ResponseFormat:
        if (self.type == "structural_tag") != bool(self.structural_tag):
            raise ValueError("format, or structures and triggers, go with structural_tag, and this with them")
        return self


class TruncationFields(Model):
    """vLLM's fields for truncating a prompt."""

    truncate_prompt_tokens: Int | None = None
    truncation_side: Literal["left", "right"] | None = None

    def truncation(self, side: Literal["left", "right"]) -> dict[str, Any]:
        """The contract's form; `side` is cut off by default."""
        if self.truncate_prompt_tokens is None:
            return {}
        end = (self.truncation_side or side) == "right"
        return {"truncate_prompt_tokens": self.truncate_prompt_tokens, "truncate_end": end}


class SamplingFields(RequestFields, TruncationFields):
    """Further ends of an answer, its form, and fields that vLLM adds."""

    n: Int | None = None
    stop: (
        Annotated[Annotated[str, Tag("$text")] | Annotated[Texts, Tag("$list")], Discriminator(text_or_list)] | None
    ) = None
    max_tokens: Int | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: Tokens | None = None
    bad_words: Texts | None = None
    min_tokens: Int | None = None
    thinking_token_budget: Count | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=4096)] | None = None
    stop_token_ids: Tokens | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: Int | None = None
    ignore_eos: bool | None = None
    stream_options: StreamOptions | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None

    @property
    def shows_stop(self) -> bool | None:
        """Whether the stop text is part of the answer, by vLLM's or SGLang's name."""
        return self.no_stop_trim if self.include_stop_str_in_output is None else self.include_stop_str_in_output

    @model_validator(mode="after")
    def _one_word_for_the_stop(self) -> SamplingFields:
        if None not in (given := (self.include_stop_str_in_output, self.no_stop_trim)) and given[0] != given[1]:
            raise ValueError("include_stop_str_in_output and no_stop_trim are aliases and have different values")
        return self

    @model_validator(mode="after")
    def _stream_options_go_with_a_stream(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options need stream: true")
        return self
