"""Between OpenAI's nouns and the contract's messages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic_core import to_json

from common.errors import InvalidInput
from common.media import data_url
from gateway.api.chat_request import (
    ChatRequest,
    Message,
    Part,
    RefusalPart,
    TemplateSettings,
    TextPart,
)
from gateway.api.fields import MediaSettings, Prompt, RequestFields, ResponseFormat, SamplingFields, shape_of
from gateway.errors import TooLarge, called
from gateway.tools import definition, forced_form, offered, places_of
from twinlens.v1 import llm_pb2, media_pb2

_CHOICE = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_ENDS = (
    *("n", "max_tokens", "min_tokens", "ignore_eos"),
    *("thinking_token_budget", "prompt_logprobs", "skip_special_tokens"),
)
"""Sampling fields that both sides call alike: how tokens are chosen, and when answers end."""
_FINISH = {
    llm_pb2.FINISH_REASON_STOP: "stop",
    llm_pb2.FINISH_REASON_LENGTH: "length",
    llm_pb2.FINISH_REASON_STRUCTURE: "stop",
}
_FORMS = "guided_json", "guided_regex", "regex", "guided_choice", "guided_grammar", "ebnf", "structured_outputs"
_STRUCTURES = "json_schema", "regex", "choice", "grammar"
"""What has the form of an answer here, and what the contract calls it."""
_ANY_OBJECT = '{"type": "object"}'
_LOW_DETAIL_PIXELS = 512 * 512
"""The area of a picture that is asked for in low detail, as OpenAI has it."""
_ROLES = {"developer": "system"}
_MODALITIES = {
    "image_url": media_pb2.MODALITY_IMAGE,
    "video_url": media_pb2.MODALITY_VIDEO,
    "audio_url": media_pb2.MODALITY_AUDIO,
    "input_audio": media_pb2.MODALITY_AUDIO,
}
Request = TypeVar("Request", llm_pb2.GenerateRequest, llm_pb2.EmbedRequest)


def choice(asked: RequestFields, max_tokens: int | None = None) -> llm_pb2.SamplingParams:
    """How tokens are chosen."""
    given = {name: value for name in _CHOICE if (value := getattr(asked, name)) is not None}
    if asked.top_k == -1:  # as vLLM has it: all of them
        given["top_k"] = 0
    seed = None if asked.seed is None else asked.seed % (1 << 64)
    return llm_pb2.SamplingParams(**given, seed=seed, max_tokens=max_tokens)


def sampling(asked: SamplingFields, max_tokens: int | None = None) -> llm_pb2.SamplingParams:
    """How tokens are chosen, and when the answer ends. Raises InvalidInput for several forms at once, or a token that
    is no number."""
    params = llm_pb2.SamplingParams(
        **{name: value for name in _ENDS if (value := getattr(asked, name)) is not None},
        stop=[asked.stop] if isinstance(asked.stop, str) else asked.stop,
        stop_token_ids=asked.stop_token_ids,
        bad_words=asked.bad_words,
        allowed_token_ids=asked.allowed_token_ids,
        logit_bias=_logit_bias(asked.logit_bias or {}),
    )
    if asked.shows_stop is not None:
        params.include_stop_str_in_output = asked.shows_stop
    params.MergeFrom(choice(asked, max_tokens))
    _set_structure(params, asked)
    return params


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    if not all(token.isdecimal() and token.isascii() and len(token) < 10 for token in given):
        raise InvalidInput("a token is named by its number", reason="BAD_FIELD", field="logit_bias")
    return {int(token): bias for token, bias in given.items()}


def _set_structure(params: llm_pb2.SamplingParams, asked: SamplingFields) -> None:
    """The form of the answer, by the fields that vLLM's users send."""
    outputs = asked.structured_outputs
    given = [
        ("json_schema", _schema(asked.guided_json)),
        ("regex", asked.guided_regex),
        ("regex", asked.regex),
        ("choice", asked.guided_choice),
        ("grammar", asked.guided_grammar),
        ("grammar", asked.ebnf),
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
            _set_form(params, kind, form)


def _set_form(params: llm_pb2.SamplingParams, kind: str, form: str | Sequence[str]) -> None:
    """Says which form the answer must have. Raises InvalidInput where it must have one already."""
    if params.WhichOneof("structured") is not None:
        raise InvalidInput("an answer can have one form", reason="BAD_FIELD", field="structured_outputs")
    if kind == "choice":
        params.choice.options.extend(form)
    else:
        setattr(params, kind, form)


def form_of_answer(request: llm_pb2.GenerateRequest) -> dict[str, bool]:
    """Whether the answer must have a form, and whether it may be calls in its place, as `OutputParser` is told."""
    constrained = request.sampling.WhichOneof("structured") is not None
    return {"constrained": constrained, "calls_or_form": request.chat.calls_or_form}


def names_of(asked: SamplingFields) -> dict[str, str]:
    """What the caller of a chat or completion calls fields that have another name here."""
    form = _form_of(asked)
    names = dict.fromkeys(_STRUCTURES, form) if form else {}
    if not isinstance(asked, ChatRequest):
        return names | {"input": "prompt"}
    names |= {"input": "messages", "media": "messages", "logprobs": "top_logprobs", **places_of(asked)}
    if asked.documents and not asked.chat_template_kwargs:
        names["chat_template_kwargs"] = "documents"
    return names if asked.max_completion_tokens is None else names | {"max_tokens": "max_completion_tokens"}


def _form_of(asked: SamplingFields) -> str:
    """The field that says which form the answer must have; empty where none does."""
    given = next((name for name in _FORMS if getattr(asked, name) is not None), "")
    if given:
        return given
    if isinstance(asked, ChatRequest) and asked.must_call:
        return "tools"
    return "response_format" if asked.response_format is not None else ""


async def named_by(
    names: Mapping[str, str], events: AsyncGenerator[llm_pb2.GenerateResponse]
) -> AsyncGenerator[llm_pb2.GenerateResponse]:
    """The same events; what is wrong with a field is so with the one that the caller knows, by `names_of`."""
    async with aclosing(events) as each:
        try:
            async for said in each:
                yield said
        except InvalidInput as error:
            raise called(error, names) from None


def set_response_format(params: llm_pb2.SamplingParams, asked: ResponseFormat) -> None:
    """The form of the answer, OpenAI's way."""
    match asked.type:
        case "json_object":
            _set_form(params, "json_schema", _ANY_OBJECT)
        case "json_schema":
            if asked.json_schema is None:
                raise InvalidInput("the schema is missing", reason="BAD_FIELD", field="response_format.json_schema")
            _set_form(params, "json_schema", _json(asked.json_schema.schema_))
        case "text":
            return


def _json(schema: dict[str, Any]) -> str:
    return to_json(schema).decode()


def _schema(given: dict[str, Any] | str | None) -> str | None:
    return _json(given) if isinstance(given, dict) else given


def generate_request(
    asked: RequestFields, params: llm_pb2.SamplingParams, request_id: str, **prompt: Any
) -> llm_pb2.GenerateRequest:
    """The whole request; `prompt` is one of its inputs, and what else only one surface has."""
    return llm_pb2.GenerateRequest(
        request_id=request_id,
        model=asked.model or "",
        sampling=params,
        cache_salt=asked.cache_salt or "",
        priority=asked.priority or 0,
        max_handovers=asked.max_handovers,
        **prompt,
    )


def prompts(given: Prompt, most: int, field: str, *, bare: bool) -> list[dict[str, Any]]:
    """Each prompt of a field that has one or several, as an input by its name; `bare` texts get no special tokens from
    the tokenizer. Raises InvalidInput for more than there may be at `most`, or none."""
    each: Any = [given] if shape_of(given) in ("$text", "$tokens") else given
    check_prompts(len(each), most, field)
    return [
        {"text": llm_pb2.TextInput(prompt=prompt, bare=bare)}
        if isinstance(prompt, str)
        else {"tokens": llm_pb2.TokensInput(ids=prompt)}
        for prompt in each
    ]


def check_prompts(count: int, most: int, field: str) -> None:
    """Raises InvalidInput for more prompts than there may be in one request, or none."""
    if not 0 < count <= most:
        raise InvalidInput(f"a request may have 1 to {most} prompts", reason="TOO_MANY_PROMPTS", field=field)


def within(limit: int, requests: Iterable[Request]) -> Iterator[Request]:
    """The requests of a body's prompts, with each of which go the fields that they share. Raises TooLarge where several
    have more than `limit` bytes together."""
    size = 0
    for number, request in enumerate(requests):
        size += request.ByteSize()
        if number and size > limit:
            said = f"prompts, each with what all of them share, may have {limit} bytes together"
            raise TooLarge(said, reason="BODY_TOO_LARGE")
        yield request


def name_of(request_id: str, number: int, prompts: int) -> str:
    """The name of one prompt's call; of several, each has its own."""
    return request_id if prompts == 1 else f"{request_id[:120]}-{number}"


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
            chat.template_variables = _json(template.model_extra)
    return chat


def continues(final: bool | None, new: bool | None) -> bool:
    """Whether an answer goes on behind the `final` message, in place of a `new` one. Raises InvalidInput for both, or
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
    """What the LLM service is asked. Raises InvalidInput."""
    params = sampling(asked, asked.max_completion_tokens)
    if asked.logprobs:
        params.logprobs = asked.top_logprobs or 0
    tools = offered(asked)
    if forced := forced_form(asked):
        _set_form(params, "json_schema", forced)
    elif asked.response_format is not None:  # in a turn that must be calls, these are the answer
        set_response_format(params, asked.response_format)
    chat = chat_input(asked.messages, asked.media_settings, asked.template_settings, "messages")
    chat.reasoning_effort = asked.reasoning_effort or chat.reasoning_effort
    chat.continue_final_message = continues(asked.continue_final_message, asked.add_generation_prompt)
    chat.tools.extend(definition(tool.function) for tool in tools)
    chat.calls_or_form = bool(tools) and not forced and params.WhichOneof("structured") == "json_schema"
    given = {"session_id": asked.prompt_cache_key or "", "return_prompt_token_ids": bool(asked.return_token_ids)}
    return generate_request(asked, params, request_id, chat=chat, **given)


def _part(part: Part, settings: MediaSettings, field: str) -> llm_pb2.ChatPart:
    if isinstance(part, TextPart | RefusalPart):
        return llm_pb2.ChatPart(text=part.text)
    if getattr(part, part.type) is None:  # its options are a part of what it is known by
        key = bytes.fromhex(part.uuid or "")
        return llm_pb2.ChatPart(media=media_pb2.Media(modality=_MODALITIES[part.type], key=key))
    media = _media(part, field)
    if part.type == "image_url":
        low = _LOW_DETAIL_PIXELS if part.image_url and part.image_url.detail == "low" else None
        _set_options(media, min_pixels=settings.min_pixels, max_pixels=low or settings.max_pixels)
    elif part.type == "video_url":
        _set_options(media, **settings.of_videos)
    return llm_pb2.ChatPart(media=media)


def _media(part: Any, field: str) -> media_pb2.Media:
    """A medium whose content came along, in base64, or its address, which nobody but an encoder fetches. A type that is
    stated says nothing: to OpenAI's callers any picture is a JPEG."""
    modality = _MODALITIES[part.type]
    if part.type == "input_audio":
        return media_pb2.Media(modality=modality, data=data_url.decode_body(part.input_audio.data, field))
    url = getattr(part, part.type).url
    if data_url.is_data(url):
        content, _ = data_url.decode(url, field)
        return media_pb2.Media(modality=modality, data=content)
    return media_pb2.Media(modality=modality, url=url)


def _set_options(media: media_pb2.Media, **options: Any) -> None:
    given = {name: value for name, value in options.items() if value is not None}
    if given:
        media.options.CopyFrom(media_pb2.MediaOptions(**given))


def media_uuids(started: llm_pb2.GenerateStarted) -> list[str]:
    """By what each medium of a request can be named from then on: its content key."""
    return [span.key.hex() for span in sorted(started.spans, key=lambda span: span.item)]


def named_by_ids(given: Iterable[llm_pb2.TokenLogprobs], ids: Iterable[int]) -> list[llm_pb2.TokenLogprobs]:
    """The same, with texts that say the tokens' numbers, as vLLM's `return_tokens_as_token_ids`: tokens that are parts
    of characters look alike otherwise."""
    return [
        llm_pb2.TokenLogprobs(
            logprob=each.logprob,
            text=_id_as_text(token),
            text_bytes=each.text_bytes,
            top=[
                llm_pb2.TopLogprob(
                    token_id=top.token_id,
                    logprob=top.logprob,
                    text=_id_as_text(top.token_id),
                    text_bytes=top.text_bytes,
                )
                for top in each.top
            ],
        )
        for each, token in zip(given, ids, strict=True)
    ]


def _id_as_text(token: int) -> str:
    return f"token_id:{token}"


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
    """Why a choice ended; `stop_reason` is the stop text that was met, or the number of the stop token, as vLLM says
    it."""
    token = finished.stop_token_id if finished.HasField("stop_token_id") else None
    return {"finish_reason": _FINISH.get(finished.reason, "stop"), "stop_reason": finished.stop_text or token}


def usage(prompts: Iterable[Sequence[llm_pb2.GenerateFinished]]) -> dict[str, Any]:
    """Tokens of all choices, which are given by prompt: each prompt counts once."""
    counted = [[each.usage for each in choices] for choices in prompts]
    prompt = sum(max(each.prompt_tokens for each in choices) for choices in counted if choices)
    cached = sum(max(each.cached_tokens for each in choices) for choices in counted if choices)
    answered = [each for choices in counted for each in choices]
    reasoning = {"reasoning_tokens": sum(each.reasoning_tokens for each in answered)}
    completion = sum(each.completion_tokens for each in answered)
    return {**usage_of(prompt, cached, completion), "completion_tokens_details": reasoning}


def usage_of(prompt: int, cached: int, completion: int) -> dict[str, Any]:
    """Tokens of prompts, those of them that the prefix cache had, and tokens of answers."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
