"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from gateway.api.fields import (
    VLLM_DEFAULTS,
    Effort,
    Int,
    MediaLoading,
    MediaSettings,
    Metadata,
    Model,
    SamplingFields,
    StreamOptions,
    Thinking,
    VideoLoading,
    kind_of,
    text_or_list,
)

_KEY: Final = re.compile("[0-9a-f]{64}")
"""A content key."""


class Cached(Model):
    """Accepts marks for Anthropic's cache, which litellm for instance sends: prefixes are cached anyway."""

    cache_control: dict[str, Any] | None = None


class TextPart(Cached):
    """A text, also as the Responses API calls one."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {"annotations": ([],), "logprobs": ([],)}

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(Cached):
    """A refusal in place of an answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """It, as a text like any other."""
        return self.refusal


class MediaPart(Cached):
    """A medium: the field named like its `type`, or the `uuid` reported by an earlier answer, under which its rows are
    still known. A caller's own `uuid` beside the medium has no effect."""

    type: str
    uuid: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _address_alone(cls, data: Any) -> Any:
        """Some clients write an address as it is."""
        kind = data.get("type") if isinstance(data, dict) else None
        if kind in ("image_url", "video_url", "audio_url") and isinstance(address := data.get(kind), str | list):
            return {**data, kind: {"url": address}}
        return data

    @model_validator(mode="after")
    def _is_there_or_known(self) -> MediaPart:
        if getattr(self, self.type) is None:
            if self.uuid is None:
                raise ValueError(f"{self.type} is missing")
            if not _KEY.fullmatch(self.uuid):
                raise ValueError(f"{self.type} is missing, and the uuid is not one that an answer gave")
        return self


class ImageUrl(Model):
    """A picture's address."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImagePart(MediaPart):
    """A picture."""

    type: Literal["image_url"]
    image_url: ImageUrl | None = None


Frames = Annotated[list[str], Field(min_length=1, max_length=10_000, fail_fast=True)]
"""Addresses of a video's frames, each a picture."""


class VideoUrl(Model):
    """A video's address, or those of its frames."""

    url: Annotated[Annotated[str, Tag("$text")] | Annotated[Frames, Tag("$list")], Discriminator(text_or_list)]


class VideoPart(MediaPart):
    """A video."""

    type: Literal["video_url"]
    video_url: VideoUrl | None = None


class QwenImagePart(MediaPart):
    """A picture, as messages of Qwen's own tools have one."""

    type: Literal["image"]
    image: str | None = None
    min_pixels: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    max_pixels: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None


class QwenVideoPart(MediaPart):
    """A video; a list of frames was sampled at `fps` or `sample_fps`, any other video is to be sampled at `fps`."""

    type: Literal["video"]
    video: (
        Annotated[Annotated[str, Tag("$text")] | Annotated[Frames, Tag("$list")], Discriminator(text_or_list)] | None
    ) = None
    fps: float | None = None
    sample_fps: float | None = None
    max_frames: Int | None = None

    @model_validator(mode="after")
    def _one_word_for_the_rate(self) -> QwenVideoPart:
        if self.sample_fps is not None and not isinstance(self.video, list):
            raise ValueError("sample_fps goes with a list of frames")
        if None not in (given := (self.fps, self.sample_fps)) and given[0] != given[1]:
            raise ValueError("fps and sample_fps of a list of frames are aliases and have different values")
        return self


class QwenAudioPart(MediaPart):
    """A clip."""

    type: Literal["audio"]
    audio: str | None = None


class Audio(Model):
    """A clip, in base64."""

    data: str
    format: Literal["wav", "mp3", "flac", "ogg", "m4a"]


class AudioPart(MediaPart):
    """A clip."""

    type: Literal["input_audio"]
    input_audio: Audio | None = None


class AudioUrl(Model):
    """A clip's address."""

    url: str


class AudioUrlPart(MediaPart):
    """A clip, by its address, as vLLM has it."""

    type: Literal["audio_url"]
    audio_url: AudioUrl | None = None


Part = Annotated[
    Annotated[TextPart, Tag("$text")]
    | Annotated[TextPart, Tag("$input_text")]
    | Annotated[TextPart, Tag("$output_text")]
    | Annotated[RefusalPart, Tag("$refusal")]
    | Annotated[ImagePart, Tag("$image_url")]
    | Annotated[VideoPart, Tag("$video_url")]
    | Annotated[AudioPart, Tag("$input_audio")]
    | Annotated[AudioUrlPart, Tag("$audio_url")]
    | Annotated[QwenImagePart, Tag("$image")]
    | Annotated[QwenVideoPart, Tag("$video")]
    | Annotated[QwenAudioPart, Tag("$audio")],
    Discriminator(kind_of),
]
Parts = Annotated[list[Part], Field(max_length=4096, fail_fast=True)]
Content = Annotated[Annotated[str, Tag("$text")] | Annotated[Parts, Tag("$list")], Discriminator(text_or_list)]


class CalledFunction(Model):
    """A call's function and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(Model):
    """A call that the model has made; `index` occurs in streams."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Int | None = None
    extra_content: Any = None
    provider_specific_fields: dict[str, Any] | None = None


class Message(Cached):
    """One message of a conversation. Fields that other servers add to answers, and clients send back, are accepted and
    ignored."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {"tool_calls": ([],)}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=4096, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    reasoning_details: Any = None
    thinking_blocks: Any = None
    extra_content: Any = None
    provider_specific_fields: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_word_for_reasoning(self) -> Message:
        if None not in (self.reasoning_content, self.reasoning) and self.reasoning_content != self.reasoning:
            raise ValueError("reasoning_content and reasoning are aliases and have different values")
        return self

    @property
    def thought(self) -> str:
        """The reasoning before the message, by either name."""
        return self.reasoning_content or self.reasoning or ""


class Function(Model):
    """A function that the model may call; `parameters` is a JSON Schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Cached):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Model):
    """A function by its name."""

    name: str


class NamedTool(Model):
    """The function that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedSet(Model):
    """Some of the functions, one of which the model may call, or must."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=4096, fail_fast=True)]


class AllowedTools(Model):
    """The same, as OpenAI has it."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedSet


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("$text")]
    | Annotated[NamedTool, Tag("$function")]
    | Annotated[AllowedTools, Tag("$allowed_tools")],
    Discriminator(lambda value: "$text" if isinstance(value, str) else kind_of(value)),
]


class TemplateSettings(Model):
    """vLLM's `chat_template_kwargs`. Templates use `enable_thinking` or `thinking` for the same switch; further
    variables are up to the template."""

    model_config = ConfigDict(extra="allow")

    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: Effort | None = None

    @model_validator(mode="after")
    def _one_word_for_thinking(self) -> TemplateSettings:
        if None not in (self.enable_thinking, self.thinking) and self.enable_thinking != self.thinking:
            raise ValueError("enable_thinking and thinking are aliases and have different values")
        return self

    @property
    def thinks(self) -> bool | None:
        """Whether the model should think, by either name."""
        return self.thinking if self.enable_thinking is None else self.enable_thinking


class ChatStreamOptions(StreamOptions):
    """Options of a chat's stream."""

    include_timings: bool | None = None


class ChatRequest(SamplingFields):
    """The body of a request."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {
        **VLLM_DEFAULTS,
        "continue_final_message": (False,),
        "echo": (False,),
        "separate_reasoning": (True,),
        "stream_reasoning": (True,),
        "return_hidden_states": (False,),
        "store": (False,),
        "modalities": (["text"],),
        "service_tier": ("auto", "default"),
        "prompt_cache_retention": ("in_memory", "in-memory"),
        "verbosity": ("medium",),
        "tools": ([],),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "parallel_tool_calls": (True,),
    }

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_completion_tokens: Int | None = None
    stream_options: ChatStreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: Annotated[list[Tool], Field(max_length=4096, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateSettings | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=4096, fail_fast=True)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_media_uuids: bool | None = None
    prompt_cache_key: str | None = None
    session_id: str | None = None
    safety_identifier: str | None = None
    metadata: Metadata | None = None
    mm_processor_kwargs: MediaSettings | None = None
    media_io_kwargs: MediaLoading | None = None
    use_audio_in_video: bool | None = None

    @property
    def media_settings(self) -> MediaSettings | None:
        """How media are preprocessed, from all fields for it; None if they contradict each other."""
        settings = self.mm_processor_kwargs or MediaSettings()
        video = (self.media_io_kwargs and self.media_io_kwargs.video) or VideoLoading()
        sound = (settings.sound, self.use_audio_in_video)
        for own, other in ((settings.fps, video.fps), (settings.max_frames, video.num_frames), sound):
            if None not in (own, other) and own != other:
                return None
        frames = {"fps": video.fps or settings.fps, "max_frames": video.num_frames or settings.max_frames}
        return settings.model_copy(update={**frames, "with_sound": sound[1] if sound[0] is None else sound[0]})

    @property
    def conversation_key(self) -> str:
        """The name of the conversation, by OpenAI's or by vLLM's and SGLang's name."""
        return self.prompt_cache_key or self.session_id or ""

    @property
    def template_settings(self) -> TemplateSettings | None:
        """Variables of the chat template, including those that are fields of their own as well."""
        more: dict[str, Any] = {"documents": self.documents} if self.documents else {}
        if self.thinking and self.thinking.type != "adaptive":
            more["enable_thinking"] = self.thinking.type == "enabled"
        if not more:
            return self.chat_template_kwargs
        return (self.chat_template_kwargs or TemplateSettings()).model_copy(update=more)

    @property
    def thinking_budget(self) -> int | None:
        """The most tokens of reasoning, by either name."""
        budget = self.thinking.budget_tokens if self.thinking else None
        return self.thinking_token_budget if budget is None else budget

    @property
    def must_call(self) -> bool:
        """The answer is calls."""
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            return choice.allowed_tools.mode == "required"
        return choice == "required" or isinstance(choice, NamedTool)

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatRequest:
        if self.include_reasoning is False and (self.logprobs or self.return_token_ids):
            raise ValueError("logprobs and return_token_ids would show the reasoning that include_reasoning hides")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs need logprobs: true")
        if None not in (most := {self.max_tokens, self.max_completion_tokens}) and len(most) > 1:
            raise ValueError("max_completion_tokens and max_tokens are aliases and have different values")
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tool_choice needs tools")
        if self.media_settings is None:
            raise ValueError("mm_processor_kwargs contradicts media_io_kwargs or use_audio_in_video")
        if None not in (keys := {self.prompt_cache_key, self.session_id}) and len(keys) > 1:
            raise ValueError("prompt_cache_key and session_id are aliases and have different values")
        within = self.chat_template_kwargs and self.chat_template_kwargs.reasoning_effort
        if within and self.reasoning_effort not in (None, within):
            raise ValueError("reasoning_effort is given twice, with different values")
        wanted = self.thinking and {"enabled": True, "disabled": False}.get(self.thinking.type)
        given = self.chat_template_kwargs and self.chat_template_kwargs.thinks
        if None not in (wanted, given) and wanted != given:
            raise ValueError("thinking and chat_template_kwargs are aliases and have different values")
        if self.thinking_token_budget not in (None, self.thinking_budget):
            raise ValueError("thinking_token_budget and thinking.budget_tokens are aliases and have different values")
        variables = (self.chat_template_kwargs and self.chat_template_kwargs.model_extra) or {}
        if self.documents and variables.get("documents", self.documents) != self.documents:
            raise ValueError("documents are given twice, with different values")
        return self
