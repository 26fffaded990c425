"""A request for a message, as the chat that it stands for."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_json

from common.errors import InvalidInput, TwinlensError
from gateway.api.chat_request import ChatRequest
from gateway.api.messages_request import (
    Block,
    CountRequest,
    CustomTool,
    ImageBlock,
    MessagesRequest,
    NamedChoice,
    NoTool,
    OutputConfig,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from gateway.errors import from_validation

_ALIKE = ("model", "cache_salt", "temperature", "top_p", "top_k", "stream", "max_tokens", "priority", "max_handovers")
"""Fields with the same name on both sides."""
_MAY_HOLD: dict[str, tuple[type[Block], ...]] = {
    "user": (TextBlock, ImageBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}
_FAILED = {"type": "text", "text": "Error:\n"}
"""Precedes the result of a failed call: chat templates have no other place for it."""
_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.content\[(\d+)\])?.*")
_TOOL = re.compile(r"(tools\[\d+\])\.function\.(\w+)")
_CALLED = {"stop": "stop_sequences", "response_format": "output_config.format", "parameters": "input_schema"}
_CALLED |= {"chat_template_kwargs.enable_thinking": "thinking", "reasoning_effort": "output_config.effort"}
_CALLED |= {"thinking_token_budget": "thinking.budget_tokens", "input": "messages", "media": "messages"}
_FORMS = ("json_schema", "structured_outputs")


@dataclass(slots=True)
class _Place:
    """The path, in the request, of a chat's message and of each of its parts."""

    message: str
    parts: list[str] = field(default_factory=list)


class Places:
    """The paths, in the original request, of a chat's parts. `form` is the path of the answer's form."""

    def __init__(self, form: str) -> None:
        self._form = form
        self.messages: list[_Place] = []

    def named(self, error: TwinlensError) -> TwinlensError:
        """The same error, by the names that fields have here."""
        if match := _MESSAGE.fullmatch(error.field):
            place = self.messages[int(match[1])]
            return error.at(place.parts[int(match[2])] if match[2] else place.message)
        if match := _TOOL.fullmatch(error.field):
            return error.at(f"{match[1]}.{_CALLED.get(match[2], match[2])}")
        if error.field in _FORMS:
            return error.at(self._form)
        return error.at(_CALLED.get(error.field, error.field.replace("tool_choice.function", "tool_choice")))


def as_chat(asked: CountRequest) -> tuple[ChatRequest, Places]:
    """The same as a chat, and the paths of its parts. Raises InvalidInput, with field names of this surface."""
    config = asked.output_config or OutputConfig()
    turns = _Turns(Places("output_config.format" if config.format else "tools"))
    if asked.system is not None:
        turns.begin_with(asked.system)
    for number, message in enumerate(asked.messages):
        turns.add(message, f"messages[{number}]")
    turns.end()
    fields: dict[str, Any] = {name: value for name in _ALIKE if (value := getattr(asked, name, None)) is not None} | {
        "messages": turns.messages,
        **_tools(asked),
    }
    if isinstance(asked, MessagesRequest):
        fields["stop"] = asked.stop_sequences
    if asked.thinking is not None and asked.thinking.type != "adaptive":
        fields["chat_template_kwargs"] = {"enable_thinking": asked.thinking.type == "enabled"}
        if asked.thinking.type == "enabled":
            fields["thinking_token_budget"] = asked.thinking.budget_tokens
    fields["reasoning_effort"] = config.effort
    if turns.end_with_words or (turns.end_with_assistant and isinstance(asked, MessagesRequest)):
        fields["continue_final_message"] = True
    if config.format is not None:
        schema = {"name": "answer", "schema": config.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    try:
        return ChatRequest.model_validate(fields), turns.places
    except ValidationError as error:
        raise turns.places.named(from_validation(error)) from None


def _tools(asked: CountRequest) -> dict[str, Any]:
    """The functions that the model may call, and whether it must."""
    tools = [{"type": "function", "function": _function(tool)} for tool in asked.tools or ()]
    fields: dict[str, Any] = {"tools": tools}
    match asked.tool_choice:
        case None:
            return fields
        case NoTool():
            return {**fields, "tool_choice": "none"}
        case NamedChoice(name=name):
            choice: Any = {"type": "function", "function": {"name": name}}
        case free:
            choice = "required" if free.type == "any" else "auto"
    return {**fields, "tool_choice": choice, "parallel_tool_calls": not asked.tool_choice.disable_parallel_tool_use}


def _function(tool: CustomTool) -> dict[str, Any]:
    return {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }


class _Turns:
    """Messages of a chat. As in Anthropic's API, consecutive turns of one side are one message; results of calls, which
    are in the user's turn, become messages of their own."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.messages: list[dict[str, Any]] = []
        self._thoughts: dict[int, list[str]] = {}
        """Of each message that has any."""

    @property
    def end_with_assistant(self) -> bool:
        """The answer continues the last message."""
        return bool(self.messages[-1]["role"] == "assistant")

    @property
    def end_with_words(self) -> bool:
        """It can do so."""
        own = self.messages[-1]
        last = own["content"][-1]["type"] if own["content"] else ""
        return self.end_with_assistant and last == "text" and "tool_calls" not in own

    def begin_with(self, system: str | list[TextBlock]) -> None:
        """Takes the system's message in."""
        self._open("system", "system")
        if isinstance(system, str):
            self._part({"type": "text", "text": system}, "system")
        else:
            for number, block in enumerate(system):
                self._block(block, f"system[{number}]")

    def add(self, message: Turn, path: str) -> None:
        """Takes a message in. Raises InvalidInput for a block that is not this role's."""
        if isinstance(message.content, str) or not message.content:
            self._go_on(message.role, path)
        if isinstance(message.content, str):
            self._part({"type": "text", "text": message.content}, path)
            return
        for number, block in enumerate(message.content):
            place = f"{path}.content[{number}]"
            if not isinstance(block, _MAY_HOLD[message.role]):
                why = f"a message of the role {message.role} holds no block of this kind"
                raise InvalidInput(why, reason="BAD_FIELD", field=f"{place}.type")
            if isinstance(block, ToolResultBlock):
                self._result(block, place)
            else:
                self._go_on(message.role, path)
                self._block(block, place)

    def end(self) -> None:
        """Ends the last message, and assigns reasoning to each."""
        for number, thoughts in self._thoughts.items():
            self.messages[number]["reasoning_content"] = "".join(thoughts)

    def _open(self, role: str, path: str) -> None:
        self.messages.append({"role": role, "content": []})
        self.places.messages.append(_Place(path))

    def _go_on(self, role: str, path: str) -> None:
        """Makes sure that the open message has this role; system messages stay apart."""
        goes_on = bool(self.messages) and self.messages[-1]["role"] == role
        if not goes_on or (role == "system" and self.places.messages[-1].message != path):
            self._open(role, path)

    def _block(self, block: Any, place: str) -> None:
        match block:
            case TextBlock():
                self._part({"type": "text", "text": block.text}, place)
            case ImageBlock(source=source):
                self._part({"type": "image_url", "image_url": {"url": source.address}}, place)
            case ThinkingBlock():
                self._thoughts.setdefault(len(self.messages) - 1, []).append(block.thinking)
            case ToolUseBlock():
                function = {"name": block.name, "arguments": to_json(block.input).decode()}
                call = {"id": block.id, "type": "function", "function": function}
                self.messages[-1].setdefault("tool_calls", []).append(call)

    def _result(self, block: ToolResultBlock, place: str) -> None:
        """The result of a call, as a message of its own."""
        self._open("tool", place)
        self.messages[-1]["tool_call_id"] = block.tool_use_id
        if block.is_error:
            self._part(dict(_FAILED), place)
        if isinstance(block.content, str):
            self._part({"type": "text", "text": block.content}, f"{place}.content")
        else:
            for number, part in enumerate(block.content or ()):
                self._block(part, f"{place}.content[{number}]")

    def _part(self, part: dict[str, Any], place: str) -> None:
        self.messages[-1]["content"].append(part)
        self.places.messages[-1].parts.append(place)
