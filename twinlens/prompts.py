"""Builds what a client sends: media from files, bytes or addresses; messages; requests. No network here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from twinlens.v1 import (
    MODALITY_AUDIO,
    MODALITY_IMAGE,
    MODALITY_VIDEO,
    ChatInput,
    ChatMessage,
    ChatPart,
    EmbedRequest,
    GenerateRequest,
    Media,
    MediaOptions,
    Modality,
    ResumedChoice,
    SamplingParams,
    TextInput,
    TokensInput,
    ToolCall,
    ToolDefinition,
    TranscriptionInput,
)

_ADDRESS = re.compile(r"[a-zA-Z][\w+.-]*://")

Source: TypeAlias = "str | Path | bytes"
"""A file's path, its content, or an http(s) or data address."""

Prompt: TypeAlias = (
    "str | ChatMessage | Sequence[ChatMessage] | ChatInput | TextInput | TokensInput | TranscriptionInput"
)
"""A question; one message; a conversation; a prompt laid out or tokenized by the caller; or a sound to be
transcribed."""


def image(
    source: Source,
    *,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    mime_type: str | None = None,
    known_key: bytes = b"",
) -> Media:
    """A picture. Raises OSError for a file that cannot be read, ValueError for an address of another kind.

    `min_pixels` and `max_pixels` bound the area after resizing (None: the model's settings). `mime_type` is
    what the bytes are said to be; the service refuses bytes that contradict it (None: they speak for
    themselves). `known_key` is the content key that an address had before, as an answer's spans say it: where
    its rows are still there, nothing is fetched.
    """
    options = MediaOptions(min_pixels=min_pixels, max_pixels=max_pixels)
    return _media(MODALITY_IMAGE, source, options, mime_type, known_key)


def video(
    source: Source,
    *,
    fps: float | None = None,
    max_frames: int | None = None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    pruning_rate: float | None = None,
    with_sound: bool = False,
    mime_type: str | None = None,
    known_key: bytes = b"",
) -> Media:
    """A video. Raises OSError for a file that cannot be read, ValueError for an address of another kind.

    `fps` frames are taken of each second, at most `max_frames` in all; `min_pixels` and `max_pixels` bound all
    frames together; `pruning_rate` is the share of tokens to drop, 0 to below 1 (each None: the model's setting).
    `with_sound` says that its own sound goes with its frames. `mime_type` and `known_key` as in `image`.
    """
    options = MediaOptions(
        fps=fps,
        max_frames=max_frames,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        video_pruning_rate=pruning_rate,
    )
    if with_sound:
        options.with_sound = True
    return _media(MODALITY_VIDEO, source, options, mime_type, known_key)


def audio(source: Source, *, mime_type: str | None = None, known_key: bytes = b"") -> Media:
    """A sound clip: WAV, MP3, FLAC, Ogg, M4A, or a video, of which its own track is heard. Raises OSError for a file
    that cannot be read, ValueError for an address of another kind. `mime_type` and `known_key` as in `image`.
    """
    return _media(MODALITY_AUDIO, source, MediaOptions(), mime_type, known_key)


def transcription(sound: Media, *, language: str = "", prompt: str = "", turns: bool = False) -> TranscriptionInput:
    """A sound whose words are wanted (see `TranscriptionInput`). `language` is what is spoken, `prompt` what is said
    beside the sound; with `turns`, a model that does not tell who speaks when refuses."""
    return TranscriptionInput(audio=sound, language=language, prompt=prompt, turns=turns)


def message(role: str, *parts: str | Media) -> ChatMessage:
    """One message of a conversation: texts and media in the order in which the model reads them."""
    return ChatMessage(role=role, parts=[_part(part) for part in parts])


def user(*parts: str | Media) -> ChatMessage:
    """A message from the user."""
    return message("user", *parts)


def system(text: str) -> ChatMessage:
    """An instruction that stands over the conversation."""
    return message("system", text)


def assistant(text: str, *calls: ToolCall, reasoning: str = "") -> ChatMessage:
    """An earlier answer of the model: what it said, the calls that it made, and what it thought before."""
    answer = message("assistant", *([text] if text else []))
    answer.tool_calls.extend(calls)
    answer.reasoning = reasoning
    return answer


def tool(name: str, description: str = "", parameters: dict[str, Any] | None = None) -> ToolDefinition:
    """A function that the model may call; `parameters` is a JSON Schema of an object (None: it has none)."""
    schema = "" if parameters is None else json.dumps(parameters, ensure_ascii=False)
    return ToolDefinition(name=name, description=description, parameters=schema)


def tool_result(text: str, call_id: str = "") -> ChatMessage:
    """What a call has given."""
    result = message("tool", text)
    result.tool_call_id = call_id
    return result


def generate_request(
    prompt: Prompt,
    sampling: SamplingParams | None = None,
    *,
    request_id: str = "",
    model: str = "",
    cache_salt: str = "",
    priority: int = 0,
    session_id: str = "",
    tools: Sequence[ToolDefinition] = (),
    thinking: bool | None = None,
    reasoning_effort: str = "",
    continue_final_message: bool = False,
    calls_or_form: bool = False,
    thinks_before_form: bool = False,
    template_variables: Mapping[str, Any] | None = None,
    return_prompt_token_ids: bool = False,
    resume: Sequence[ResumedChoice] = (),
    max_handovers: int | None = None,
    truncate_prompt_tokens: int | None = None,
    truncate_end: bool = False,
) -> GenerateRequest:
    """The request for a prompt. The names are `GenerateRequest`'s; a default leaves its field unset. `tools`,
    `thinking`, `reasoning_effort`, `continue_final_message`, `calls_or_form`, `thinks_before_form` and
    `template_variables`, made JSON (see `ChatInput`), go with a conversation alone, else ValueError."""
    request = GenerateRequest(
        request_id=request_id,
        model=model,
        sampling=sampling,
        cache_salt=cache_salt,
        priority=priority,
        session_id=session_id,
        resume=resume,
        max_handovers=max_handovers,
        return_prompt_token_ids=return_prompt_token_ids,
        truncate_prompt_tokens=truncate_prompt_tokens,
        truncate_end=truncate_end,
    )
    of_answer = continue_final_message, calls_or_form, thinks_before_form
    of_template = any((tools, reasoning_effort, template_variables, thinking is not None, *of_answer))
    if of_template and isinstance(prompt, TextInput | TokensInput | TranscriptionInput):
        raise ValueError("tools and thinking need a conversation, which the chat template lays out")
    match prompt:
        case TextInput():
            request.text.CopyFrom(prompt)
        case TokensInput():
            request.tokens.CopyFrom(prompt)
        case TranscriptionInput():
            request.transcription.CopyFrom(prompt)
        case _:
            variables = json.dumps(template_variables, allow_nan=False) if template_variables else ""
            request.chat.CopyFrom(chat(prompt))
            said_of_it = ChatInput(
                tools=tools,
                reasoning_effort=reasoning_effort,
                continue_final_message=continue_final_message,
                calls_or_form=calls_or_form,
                thinks_before_form=thinks_before_form,
                template_variables=variables,
            )
            if thinking is not None:
                said_of_it.thinking = thinking
            request.chat.MergeFrom(said_of_it)  # a `ChatInput` that was given keeps what nothing is said of
    return request


def embed_request(
    prompt: Prompt,
    *,
    dimensions: int | None = None,
    request_id: str = "",
    model: str = "",
    cache_salt: str = "",
    priority: int = 0,
    max_handovers: int | None = None,
    truncate_prompt_tokens: int | None = None,
    truncate_end: bool = False,
) -> EmbedRequest:
    """The request for a prompt's embedding. The names are `EmbedRequest`'s; a default leaves its field unset. Raises
    ValueError for a sound whose words are wanted: that is no prompt to embed."""
    request = EmbedRequest(
        dimensions=dimensions,
        request_id=request_id,
        model=model,
        cache_salt=cache_salt,
        priority=priority,
        max_handovers=max_handovers,
        truncate_prompt_tokens=truncate_prompt_tokens,
        truncate_end=truncate_end,
    )
    match prompt:
        case TextInput():
            request.text.CopyFrom(prompt)
        case TokensInput():
            request.tokens.CopyFrom(prompt)
        case TranscriptionInput():
            raise ValueError("to embed a sound, put it in a message, as `user(audio(…))`")
        case _:
            request.chat.CopyFrom(chat(prompt))
    return request


def chat(prompt: str | ChatMessage | Sequence[ChatMessage] | ChatInput) -> ChatInput:
    """A conversation: a bare text is one user message."""
    match prompt:
        case ChatInput():
            return prompt
        case ChatMessage():
            return ChatInput(messages=[prompt])
        case str():
            return ChatInput(messages=[user(prompt)])
        case _:
            return ChatInput(messages=prompt)


def _part(part: str | Media) -> ChatPart:
    return ChatPart(text=part) if isinstance(part, str) else ChatPart(media=part)


def _media(modality: Modality, source: Source, options: MediaOptions, mime_type: str | None, known_key: bytes) -> Media:
    media = Media(modality=modality, mime_type=mime_type, known_key=known_key)
    if options.ListFields():
        media.options.CopyFrom(options)
    if isinstance(source, bytes):
        media.data = source
    elif isinstance(source, str) and source.lower().startswith(("http://", "https://", "data:")):
        media.url = source
    elif isinstance(source, str) and (not source or _ADDRESS.match(source)):
        raise ValueError(f"{source or 'nothing'} is neither a file nor an http, https or data address")
    else:
        media.data = Path(source).read_bytes()
    return media
