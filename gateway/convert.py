"""Between OpenAI's nouns and the contract's messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from common.errors import InvalidInput
from gateway.api.fields import MediaSettings, Sampling
from twinlens.v1 import llm_pb2, media_pb2

if TYPE_CHECKING:
    from gateway.api.chat import Function, Message, Part, ResponseFormat

_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "n", "max_tokens", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Sampling fields that both sides call alike."""
_FINISH = {
    llm_pb2.FINISH_REASON_STOP: "stop",
    llm_pb2.FINISH_REASON_LENGTH: "length",
    llm_pb2.FINISH_REASON_STRUCTURE: "stop",
}
_ANY_OBJECT = '{"type": "object"}'
_LOW_DETAIL_PIXELS = 512 * 512
"""The area of a picture that is asked for in low detail, as OpenAI has it."""
_ROLES = {"developer": "system"}


def sampling(asked: Sampling, max_tokens: int | None = None) -> llm_pb2.SamplingParams:
    """How tokens are chosen. Raises InvalidInput for several forms at once, or a token that is no number."""
    given = {name: value for name in _SAME if (value := getattr(asked, name)) is not None}
    if max_tokens is not None:
        given["max_tokens"] = max_tokens
    if asked.seed is not None:
        given["seed"] = asked.seed % (1 << 64)
    params = llm_pb2.SamplingParams(
        **given,
        stop=[asked.stop] if isinstance(asked.stop, str) else asked.stop,
        stop_token_ids=asked.stop_token_ids,
        logit_bias=_logit_bias(asked.logit_bias or {}),
    )
    _set_structure(params, asked)
    return params


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    if not all(token.isdecimal() and token.isascii() and len(token) < 10 for token in given):
        raise InvalidInput("a token is named by its number", reason="BAD_FIELD", field="logit_bias")
    return {int(token): bias for token, bias in given.items()}


def _set_structure(params: llm_pb2.SamplingParams, asked: Sampling) -> None:
    """The form of the answer, by the fields that vLLM's users send."""
    outputs = asked.structured_outputs
    given = [
        ("json_schema", _schema(asked.guided_json)),
        ("regex", asked.guided_regex),
        ("choice", asked.guided_choice),
        ("grammar", asked.guided_grammar),
    ]
    if outputs is not None:
        given += [
            ("json_schema", _schema(outputs.json_)),
            ("regex", outputs.regex),
            ("choice", outputs.choice),
            ("grammar", outputs.grammar),
            ("json_schema", _ANY_OBJECT if outputs.json_object else None),
        ]
    for kind, form in given:
        if form is not None:
            set_form(params, kind, form)


def set_form(params: llm_pb2.SamplingParams, kind: str, form: str | Sequence[str]) -> None:
    """Says which form the answer must have. Raises InvalidInput where it must have one already."""
    if params.WhichOneof("structured") is not None:
        raise InvalidInput("an answer can have one form", reason="BAD_FIELD", field="structured_outputs")
    if kind == "choice":
        params.choice.options.extend(form)
    else:
        setattr(params, kind, form)


def set_response_format(params: llm_pb2.SamplingParams, asked: ResponseFormat) -> None:
    """The form of the answer, OpenAI's way."""
    match asked.type:
        case "json_object":
            set_form(params, "json_schema", _ANY_OBJECT)
        case "json_schema":
            if asked.json_schema is None:
                raise InvalidInput("the schema is missing", reason="BAD_FIELD", field="response_format.json_schema")
            set_form(params, "json_schema", schema(asked.json_schema.schema_))
        case "text":
            return


def schema(given: dict[str, Any]) -> str:
    """A schema as JSON."""
    return to_json(given).decode()


def _schema(given: dict[str, Any] | str | None) -> str | None:
    return schema(given) if isinstance(given, dict) else given


def generate_request(
    asked: Sampling, params: llm_pb2.SamplingParams, request_id: str, **prompt: Any
) -> llm_pb2.GenerateRequest:
    """The whole request; `prompt` is one of chat, text and tokens, and what else only one surface has."""
    return llm_pb2.GenerateRequest(
        request_id=request_id,
        model=asked.model or "",
        sampling=params,
        cache_salt=asked.cache_salt or "",
        priority=asked.priority or 0,
        **prompt,
    )


def message(given: Message, settings: MediaSettings, field: str) -> llm_pb2.ChatMessage:
    """One message: its parts in order. An assistant's that calls may have none."""
    if given.content is None and not given.tool_calls:
        raise InvalidInput("a message has content", reason="BAD_FIELD", field=f"{field}.content")
    if given.role == "tool" and given.tool_call_id is None:
        raise InvalidInput("the call is not named", reason="BAD_FIELD", field=f"{field}.tool_call_id")
    parts = (
        [llm_pb2.ChatPart(text=given.content)]
        if isinstance(given.content, str)
        else [_part(part, settings) for part in given.content or ()]
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
        reasoning=given.reasoning_content or "",
    )


def tool(function: Function) -> llm_pb2.ToolDefinition:
    """A function that the model may call."""
    return llm_pb2.ToolDefinition(
        name=function.name,
        description=function.description or "",
        parameters="" if function.parameters is None else schema(function.parameters),
    )


def calls_schema(functions: Sequence[Function], most: int | None) -> str:
    """What an answer looks like that is one or more calls, at most so many."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"enum": [function.name]},
                "parameters": function.parameters or {"type": "object"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    bound = {} if most is None else {"maxItems": most}
    return schema({"type": "array", "items": {"anyOf": calls}, "minItems": 1, **bound})


def _part(part: Part, settings: MediaSettings) -> llm_pb2.ChatPart:
    match part.type:
        case "text":
            return llm_pb2.ChatPart(text=part.text)
        case "image_url":
            low = _LOW_DETAIL_PIXELS if part.image_url.detail == "low" else None
            media = _media(media_pb2.MODALITY_IMAGE, part.image_url.url)
            _set_options(media, min_pixels=settings.min_pixels, max_pixels=low or settings.max_pixels)
        case "video_url":
            media = _media(media_pb2.MODALITY_VIDEO, part.video_url.url)
            _set_options(media, **dict(settings))
        case _:
            clip = part.input_audio
            media = _media(media_pb2.MODALITY_AUDIO, f"data:audio/{clip.format};base64,{clip.data}")
    return llm_pb2.ChatPart(media=media)


def _media(modality: media_pb2.Modality, url: str) -> media_pb2.Media:
    """What is given by address; nobody but an encoder fetches it, and a data address is read there as well."""
    return media_pb2.Media(modality=modality, url=url)


def _set_options(media: media_pb2.Media, **options: Any) -> None:
    given = {name: value for name, value in options.items() if value is not None}
    if given:
        media.options.CopyFrom(media_pb2.MediaOptions(**given))


def chat_logprobs(given: Iterable[llm_pb2.TokenLogprobs]) -> list[dict[str, Any]]:
    """How likely tokens were, as chat completions say it."""
    return [
        {
            "token": each.text,
            "logprob": each.logprob,
            "bytes": list(each.text_bytes),
            "top_logprobs": [
                {"token": top.text, "logprob": top.logprob, "bytes": list(top.text_bytes)} for top in each.top
            ],
        }
        for each in given
    ]


def finish(finished: llm_pb2.GenerateFinished) -> dict[str, Any]:
    """Why a choice ended; `stop_reason` is the stop text that was met, as vLLM says it."""
    return {"finish_reason": _FINISH.get(finished.reason, "stop"), "stop_reason": finished.stop_text or None}


def usage(prompts: Iterable[Sequence[llm_pb2.GenerateFinished]]) -> dict[str, Any]:
    """Tokens of all choices, which are given by prompt: each prompt counts once."""
    counted = [[each.usage for each in choices] for choices in prompts]
    prompt = sum(max(each.prompt_tokens for each in choices) for choices in counted if choices)
    cached = sum(max(each.cached_tokens for each in choices) for choices in counted if choices)
    completion = sum(each.completion_tokens for choices in counted for each in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
