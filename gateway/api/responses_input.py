"""A request for a response, as the chat that it stands for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from common.errors import InvalidInput, TwinlensError
from gateway.api.fields import RequestFields
from gateway.api.responses_request import (
    AllowedTools,
    CallItem,
    ImagePart,
    InputTokensRequest,
    MessageItem,
    NamedFunction,
    OfferedFunction,
    ReasoningItem,
    RefusalPart,
    ResponsesRequest,
    ResultItem,
    TextPart,
)
from gateway.errors import called

_ALIKE = {*RequestFields.model_fields, "parallel_tool_calls", "prompt_cache_key", "stop", "ignore_eos", "logit_bias"}
_ALIKE |= {"skip_special_tokens", "thinking_token_budget", "include_stop_str_in_output", "structured_outputs"}
_ALIKE |= {"mm_processor_kwargs", "chat_template_kwargs"}
"""Fields with the same name on both sides."""


def as_chat(asked: InputTokensRequest, places: list[int]) -> dict[str, Any]:
    """The same as a chat's body; `places` gets, for each message, the index of the item that it is of."""
    fields = asked.model_dump(include=_ALIKE, exclude_none=True, by_alias=True)
    fields["messages"] = list(_messages(asked, places))
    if isinstance(asked, ResponsesRequest):
        fields |= _of_the_answer(asked)
    if asked.tools:
        fields["tools"] = [{"type": "function", "function": _definition(each)} for each in asked.functions]
    if isinstance(asked.tool_choice, NamedFunction):
        fields["tool_choice"] = _named(asked.tool_choice)
    elif isinstance(asked.tool_choice, AllowedTools):
        allowed = {"mode": asked.tool_choice.mode, "tools": [_named(tool) for tool in asked.tool_choice.tools]}
        fields["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
    elif asked.tool_choice is not None:
        fields["tool_choice"] = asked.tool_choice
    if asked.reasoning is not None:
        fields["reasoning_effort"] = asked.reasoning.effort
    form = asked.text.format if asked.text else None
    if form is not None:
        fields["response_format"] = {"type": form.type}
        if form.type == "json_schema":
            if form.schema_ is None:
                raise InvalidInput("the schema is missing", reason="BAD_FIELD", field="text.format.schema")
            fields["response_format"]["json_schema"] = {"name": form.name or "answer", "schema": form.schema_}
    return fields


def _of_the_answer(asked: ResponsesRequest) -> dict[str, Any]:
    """Fields with another name in a chat that do not concern its prompt, or shorten it."""
    fields: dict[str, Any] = {}
    if asked.max_output_tokens is not None:
        fields["max_tokens"] = asked.max_output_tokens
    if asked.with_logprobs:
        fields |= {"logprobs": True, "top_logprobs": asked.top_logprobs}
    if asked.truncation:
        fields["truncate_prompt_tokens"] = -1
    return fields


def _definition(offered: OfferedFunction) -> dict[str, Any]:
    """A function as a chat has it. Chat templates know no groups: a function begins with what its group's says."""
    fields = offered.function.model_dump(exclude={"type"}, exclude_none=True)
    if offered.group and offered.group.description:
        said = (offered.group.description, offered.function.description)
        fields["description"] = "\n\n".join(filter(None, said))
    return fields


def _named(function: NamedFunction) -> dict[str, Any]:
    return {"type": "function", "function": {"name": function.name}}


def _messages(asked: InputTokensRequest, places: list[int]) -> Iterator[dict[str, Any]]:
    """The messages of a chat. An assistant's reasoning, calls and text become one message."""
    if asked.instructions:
        places.append(-1)
        yield {"role": "system", "content": asked.instructions}
    if isinstance(asked.input, str):
        places.append(-1)
        yield {"role": "user", "content": asked.input}
        return
    own: dict[str, Any] = {}
    for place, item in enumerate(asked.input):
        match item:
            case ReasoningItem():
                if own:
                    yield _whole(own)
                own = {"role": "assistant", "reasoning_content": item.thought}
                places.append(place)
                continue
            case CallItem():
                if not own:
                    own = {"role": "assistant"}
                    places.append(place)
                function = {"name": item.name, "arguments": item.arguments}
                own.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
                continue
            case MessageItem(role="assistant") if own and "content" not in own and "tool_calls" not in own:
                own["content"] = _content(item.content)
                continue
            case MessageItem(role="assistant"):
                if own:
                    yield _whole(own)
                own = {"role": "assistant", "content": _content(item.content)}
                places.append(place)
                continue
            case _:
                pass
        if own:
            yield _whole(own)
            own = {}
        places.append(place)
        if isinstance(item, ResultItem):
            yield {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}
        else:
            yield {"role": item.role, "content": _content(item.content)}
    if own:
        yield _whole(own)


def _whole(own: dict[str, Any]) -> dict[str, Any]:
    """The model's own message, which is empty if its answer was cut off during reasoning."""
    return own if "tool_calls" in own else {"content": "", **own}


def _content(given: str | list[TextPart | RefusalPart | ImagePart]) -> str | list[dict[str, Any]]:
    if isinstance(given, str):
        return given
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, TextPart | RefusalPart)
        else {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}}
        for part in given
    ]


_MESSAGE = re.compile(r"messages\[(\d+)\](.*)")
_CALLED = {
    "max_tokens": "max_output_tokens",
    "media": "input",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "tool_choice.function.name": "tool_choice.name",
    "tool_choice.allowed_tools.tools": "tool_choice.tools",
    "truncate_prompt_tokens": "truncation",
}
_TOOL = re.compile(r"tools\[(\d+)\]\.function\.(\w+)")


def of_input(error: TwinlensError, places: list[int], functions: Sequence[OfferedFunction]) -> TwinlensError:
    """The same error, by the names that fields have here."""
    if match := _MESSAGE.fullmatch(error.field):
        place = places[int(match[1])]
        return error.at(f"input[{place}]{match[2]}" if place >= 0 else "input")
    if match := _TOOL.fullmatch(error.field):
        return error.at(f"{functions[int(match[1])].place}.{match[2]}")
    return called(error, _CALLED)
