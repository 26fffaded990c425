"""Kimi's calls, `functions.name:0`, a mark and the arguments as JSON, in a section of calls."""

from __future__ import annotations

import re
from typing import Final

from gateway.tool_parsers.arguments import parsed_call
from gateway.tool_parsers.tool_parser import Call, Functions, MarkedJson, Reader, all_named

BEGIN: Final = "<|tool_call_begin|>"
SECTION: Final = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_ARGUMENTS: Final = "<|tool_call_argument_begin|>"
HEADS: Final = (
    re.compile(
        r"\s{0,64}(?:functions\.)?(?P<name>[\w.-]{1,128})(?::\d{1,16})?\s{0,64}"
        + re.escape(_ARGUMENTS)
        + r"\s{0,64}(?=\{)"
    ),
)
_NAME = re.compile(r"\s*(?:functions\.)?([\w.-]+)(?::\d+)?\s*")


def kimi_reader(_: Functions) -> Reader:
    """Reads up to `<|tool_call_end|>`."""
    return MarkedJson("<|tool_call_end|>", _call)


def _call(body: str) -> list[Call] | None:
    head, mark, arguments = body.partition(_ARGUMENTS)
    name = _NAME.fullmatch(head)
    if name is None or not mark:
        return None
    return all_named([{"name": name[1], "arguments": parsed_call(arguments) if arguments.strip() else {}}])
