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


def chat_input(
    messages: Sequence[Message], settings: MediaSettings | None, template: TemplateSettings | None, field: str
) -> llm_pb2.ChatInput:
    """A conversation without tools."""
    settings = settings or MediaSettings()
    chat = llm_pb2.ChatInput(
        messages=[message(each, settings, f"{field}[{number}]") for number, each in enumerate(messages)]
    )
    if template is not None:
        chat.reasoning_effort = template.reasoning_effort or ""
        if template.thinks is not None:
            chat.thinking = template.thinks
        if template.model_extra:
            chat.template_variables = json_of(template.model_extra)
    return chat


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


def message(given: Message, settings: MediaSettings, field: str) -> llm_pb2.ChatMessage:
    """One message: its parts in order. An assistant's that calls, or thought alone, may have none. Takes milliseconds
    for megabytes of base64. Raises InvalidInput."""
    content = given.refusal if given.content is None else given.content
    if content is None and not given.tool_calls and not (given.role == "assistant" and given.thought):
        raise InvalidInput("a message needs content", reason="BAD_FIELD", field=f"{field}.content")
    if given.role == "tool" and given.tool_call_id is None:
        raise InvalidInput("the call is not named", reason="BAD_FIELD", field=f"{field}.tool_call_id")
    parts = (
        [llm_pb2.ChatPart(text=content)]
        if isinstance(content, str)
        else [_part(part, settings, f"{field}.content[{number}]") for number, part in enumerate(content or ())]
    )
    calls = [
        llm_pb2.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
        for call in given.tool_calls or ()
    ]
    return llm_pb2.ChatMessage(
        role=_ROLES.get(given.role, given.role),
        parts=parts,
        tool_calls=calls,
        tool_call_id=given.tool_call_id or "",
        reasoning=given.thought,
    )


def chat_request(asked: ChatRequest, request_id: str) -> llm_pb2.GenerateRequest:
    """The LLM service's request. Raises InvalidInput."""
    params = sampling(asked, asked.max_completion_tokens)
    if asked.logprobs:
        params.logprobs = asked.top_logprobs or 0
    tools = offered(asked)
    if forced := forced_form(asked):
        set_form(params, "json_schema", forced)
    elif asked.response_format is not None:  # in a turn that must be calls, these are the answer
        set_response_format(params, asked.response_format)
    chat = chat_input(asked.messages, asked.media_settings, asked.template_settings, "messages")
    chat.reasoning_effort = asked.reasoning_effort or chat.reasoning_effort
    chat.continue_final_message = continues(asked.continue_final_message, asked.add_generation_prompt)
    chat.tools.extend(definition(tool.function) for tool in tools)
    chat.calls_or_form = bool(tools) and not forced and params.WhichOneof("structured") == "json_schema"
    silent = (chat.HasField("thinking") and not chat.thinking) or chat.reasoning_effort == "none"
    constrained = params.WhichOneof("structured") is not None
    chat.thinks_before_form = constrained and not (silent or chat.continue_final_message)
    given = {"session_id": asked.prompt_cache_key or "", "return_prompt_token_ids": bool(asked.return_token_ids)}
    return generate_request(asked, params, request_id, chat=chat, **given, **asked.truncation("left"))


def _part(part: Part, settings: MediaSettings, field: str) -> llm_pb2.ChatPart:
    if isinstance(part, TextPart | RefusalPart):
        return llm_pb2.ChatPart(text=part.text)
    if getattr(part, part.type) is None:  # options are part of the key of cached rows
        key = bytes.fromhex(part.uuid or "")
        return llm_pb2.ChatPart(media=media_pb2.Media(modality=_MODALITIES[part.type], key=key))
    media = _media(part, field)
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
    return llm_pb2.ChatPart(media=media)


def _media(part: Any, field: str) -> media_pb2.Media:
    """A medium with its content in base64, or its address, which only encoders fetch. Stated types are ignored:
    OpenAI's clients call any picture a JPEG."""
    modality = _MODALITIES[part.type]
    if part.type == "input_audio":
        return media_pb2.Media(modality=modality, data=data_url.decode_body(part.input_audio.data, field))
    address = getattr(part, part.type)
    url = address if isinstance(address, str | list) else address.url
    if isinstance(url, list):
        return media_pb2.Media(modality=modality, data=b"".join(_frames(url, f"{field}.{part.type}")))
    if data_url.is_data(url):
        content, _ = data_url.decode(url, field)
        return media_pb2.Media(modality=modality, data=content)
    return media_pb2.Media(modality=modality, url=url)


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
