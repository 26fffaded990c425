"""Functions that a model may call, its calls, and JSON that callers write."""

from __future__ import annotations

from typing import Any

import msgspec

from common.errors import InvalidInput
from llm_service.request import (
    ToolCall,
    ToolDefinition,
)
from twinlens.v1 import llm_pb2


def read_tool(message: llm_pb2.ToolDefinition, max_depth: int, field: str) -> ToolDefinition:
    """A function, nested no deeper than `max_depth`. Raises InvalidInput."""
    _check_name(message.name, field)
    parameters = _parsed(message.parameters, max_depth, f"{field}.parameters") if message.parameters else None
    return ToolDefinition(message.name, message.description, parameters, message.strict)


def read_tool_call(message: llm_pb2.ToolCall, max_depth: int, field: str) -> ToolCall:
    """A call, nested no deeper than `max_depth`. Raises InvalidInput."""
    _check_name(message.name, field)
    return ToolCall(message.id, message.name, _parsed(message.arguments or "{}", max_depth, f"{field}.arguments"))


def _check_name(name: str, field: str) -> None:
    if not name:
        raise InvalidInput("a function has no name", reason="BAD_TOOL", field=f"{field}.name")


def _parsed(text: str, max_depth: int, field: str) -> dict[str, Any]:
    value = parsed_json(text, max_depth)
    if value is None:
        raise InvalidInput("this is not a JSON object, or is nested too deeply", reason="BAD_TOOL", field=field)
    return value


def parsed_json(text: str, max_depth: int) -> dict[str, Any] | None:
    """A JSON object nested no deeper than `max_depth`; None if it is anything else."""
    try:
        value = msgspec.json.decode(text)  # unlike the library's, it takes no NaN and no half of a pair of surrogates
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) and _is_flat(value, max_depth) else None


def _is_flat(value: Any, depth: int) -> bool:
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_is_flat(each, depth - 1) for each in inner)
    return True
