"""A conversation as OpenAI has it, with its media, as the contract has it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from common.errors import InvalidInput
from common.media import data_url
from gateway.api.chat_request import (
    ChatRequest,
    ImagePart,
    Message,
    Part,
    QwenImagePart,
    QwenVideoPart,
    RefusalPart,
    TemplateSettings,
    TextPart,
    VideoPart,
)
from gateway.api.fields import MediaSettings
from gateway.convert.prompt_inputs import generate_request
from gateway.convert.sampling_params import json_of, sampling, set_form, set_response_format
from gateway.tools import definition, forced_form, offered
from twinlens.v1 import llm_pb2, media_pb2

_LOW_DETAIL_PIXELS = 512 * 512
"""The area of a picture that is asked for in low detail, as OpenAI has it."""
_ROLES = {"developer": "system"}
_MODALITIES = {
    "image_url": media_pb2.MODALITY_IMAGE,
    "video_url": media_pb2.MODALITY_VIDEO,
    "audio_url": media_pb2.MODALITY_AUDIO,
    "input_audio": media_pb2.MODALITY_AUDIO,
    "image": media_pb2.MODALITY_IMAGE,
    "video": media_pb2.MODALITY_VIDEO,
    "audio": media_pb2.MODALITY_AUDIO,
}


def fill_chat(
    chat: llm_pb2.ChatInput,
    messages: Sequence[Message],
    settings: MediaSettings | None,
    template: TemplateSettings | None,
    field: str,
) -> None:
    """Fills in a conversation without tools. Everything is made in its place: protobuf would copy a message, with its
    megabytes of media, into each one that is made of it. Raises InvalidInput."""
    settings = settings or MediaSettings()
    for number, each in enumerate(messages):
        _fill_message(chat.messages.add(), each, settings, f"{field}[{number}]")
    if template is not None:
        chat.reasoning_effort = template.reasoning_effort or ""
        if template.thinks is not None:
            chat.thinking = template.thinks
        if template.model_extra:
            chat.template_variables = json_of(template.model_extra)


def continues(final: bool | None, new: bool | None) -> bool:
    """Whether an answer continues the `final` message instead of beginning a `new` one. Raises InvalidInput for both or
    neither."""
    if final and new:
        why = "either the final message is continued, or a new one is begun"
        raise InvalidInput(why, reason="BAD_FIELD", field="continue_final_message")
    if new is False and not final:
        why = "an answer is a new message, or continues the final one"
        raise InvalidInput(why, reason="FIELD_NOT_SERVED", field="add_generation_prompt")
    return bool(final)


def _fill_message(message: llm_pb2.ChatMessage, given: Message, settings: MediaSettings, field: str) -> None:
    """One message: its parts in order. An assistant's that calls, or thought alone, may have none. Takes milliseconds
    for megabytes of base64. Raises InvalidInput."""
    content = given.refusal if given.content is None else given.content
    if content is None and not given.tool_calls and not (given.role == "assistant" and given.thought):
        raise InvalidInput("a message needs content", reason="BAD_FIELD", field=f"{field}.content")
    if given.role == "tool" and given.tool_call_id is None:
        raise InvalidInput("the call is not named", reason="BAD_FIELD", field=f"{field}.tool_call_id")
    message.role = _ROLES.get(given.role, given.role)
    message.tool_call_id = given.tool_call_id or ""
    message.reasoning = given.thought
    if isinstance(content, str):
        message.parts.add(text=content)
    else:
        for number, part in enumerate(content or ()):
            _fill_part(message.parts.add(), part, settings, f"{field}.content[{number}]")
    for call in given.tool_calls or ():
        message.tool_calls.add(id=call.id, name=call.function.name, arguments=call.function.arguments)


def chat_request(asked: ChatRequest, request_id: str) -> llm_pb2.GenerateRequest:
    """The LLM service's request. Raises InvalidInput."""
    params = sampling(asked, asked.max_completion_tokens)
    if asked.thinking_budget is not None:
        params.thinking_token_budget = asked.thinking_budget
    if asked.logprobs:
        params.logprobs = asked.top_logprobs or 0
    tools = offered(asked)
    if forced := forced_form(asked):
        set_form(params, "json_schema", forced)
    elif asked.response_format is not None:  # in a turn that must be calls, these are the answer
        set_response_format(params, asked.response_format)
    given = {"session_id": asked.conversation_key, "return_prompt_token_ids": bool(asked.return_token_ids)}
    request = generate_request(asked, params, request_id, **given, **asked.truncation("left"))
    chat = request.chat
    fill_chat(chat, asked.messages, asked.media_settings, asked.template_settings, "messages")
    chat.reasoning_effort = asked.reasoning_effort or chat.reasoning_effort
    chat.continue_final_message = continues(asked.continue_final_message, asked.add_generation_prompt)
    chat.tools.extend(definition(tool.function) for tool in tools)
    chat.calls_or_form = bool(tools) and not forced and params.WhichOneof("structured") == "json_schema"
    silent = (chat.HasField("thinking") and not chat.thinking) or chat.reasoning_effort == "none"
    constrained = params.WhichOneof("structured") is not None
    chat.thinks_before_form = constrained and not (silent or chat.continue_final_message)
    return request


def _fill_part(message: llm_pb2.ChatPart, part: Part, settings: MediaSettings, field: str) -> None:
    if isinstance(part, TextPart | RefusalPart):
        message.text = part.text
        return
    media = message.media
    media.modality = _MODALITIES[part.type]
    if getattr(part, part.type) is None:  # options are part of the key of cached rows
        media.key = bytes.fromhex(part.uuid or "")
        return
    _fill_source(media, part, field)
    pixels = {"min_pixels": settings.min_pixels, "max_pixels": settings.max_pixels}
    match part:
        case ImagePart():
            if part.image_url is not None and part.image_url.detail == "low":
                most = min(_LOW_DETAIL_PIXELS, settings.max_pixels or _LOW_DETAIL_PIXELS)
                pixels |= {"max_pixels": most, "clamp_max_pixels": True}
            _set_options(media, **pixels)
        case QwenImagePart():
            _set_options(media, **(pixels | part.model_dump(include=set(pixels), exclude_none=True)))
        case VideoPart():
            _set_options(media, **settings.of_videos)
        case QwenVideoPart():
            own = {"fps": part.fps or part.sample_fps, "max_frames": part.max_frames}
            _set_options(media, **(settings.of_videos | {name: each for name, each in own.items() if each is not None}))


def _fill_source(media: media_pb2.Media, part: Any, field: str) -> None:
    """A medium's content, which comes in base64, or its address, which only encoders fetch. Stated types are ignored:
    OpenAI's clients call any picture a JPEG."""
    if part.type == "input_audio":
        media.data = data_url.decode_body(part.input_audio.data, field)
        return
    address = getattr(part, part.type)
    url = address if isinstance(address, str | list) else address.url
    if isinstance(url, list):
        media.data = b"".join(_frames(url, f"{field}.{part.type}"))
    elif data_url.is_data(url):
        media.data, _ = data_url.decode(url, field)
    else:
        media.url = url


def _frames(addresses: Sequence[str], field: str) -> Iterator[bytes]:
    """The pictures of a list of frames. Raises InvalidInput for one that would have to be fetched."""
    for number, address in enumerate(addresses):
        place = f"{field}[{number}]"
        if not data_url.is_data(address):
            why = "frames of a video must be data addresses: they are not fetched"
            raise InvalidInput(why, reason="FIELD_NOT_SERVED", field=place)
        yield data_url.decode(address, place)[0]


def _set_options(media: media_pb2.Media, **options: Any) -> None:
    given = {name: value for name, value in options.items() if value is not None}
    if given:
        media.options.CopyFrom(media_pb2.MediaOptions(**given))


def form_of_answer(request: llm_pb2.GenerateRequest) -> dict[str, Any]:
    """The form that the answer must have, if any, and whether it may be calls in its place, as `OutputParser` is
    told."""
    kind = request.sampling.WhichOneof("structured")
    text = "" if kind in (None, "json_schema") else str(getattr(request.sampling, kind))
    constrained = kind is not None and not request.chat.thinks_before_form
    return {"constrained": constrained, "form_text": text, "calls_or_form": request.chat.calls_or_form}
