"""DeepSeek's calls in a section of them: a name, a separator and the arguments as JSON; before V3.1, a kind, the
separator, the name, and the arguments in a fence."""

from __future__ import annotations

import re
from typing import Final

from gateway.tool_parsers.arguments import parsed_call
from gateway.tool_parsers.tool_parser import Call, Functions, MarkedJson, Reader, all_named

BEGIN: Final = "<｜tool▁call▁begin｜>"
SECTION: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
HEADS: Final = (
    re.compile(r"\s{0,64}(?P<name>[\w.-]{1,128})\s{0,64}<｜tool▁sep｜>\s{0,64}(?=\{)"),
    re.compile(r"\s{0,64}\w{1,128}<｜tool▁sep｜>(?P<name>[\w.-]{1,128})\s{0,64}```json\s{0,64}(?=\{)"),
)
_FENCE: Final = "```"
_HEAD = re.compile(r"\s*(?:\w+<｜tool▁sep｜>(?P<old>[\w.-]+)\s*```json|(?P<name>[\w.-]+)\s*<｜tool▁sep｜>)")


def deepseek_reader(_: Functions) -> Reader:
    """Reads up to `<｜tool▁call▁end｜>`."""
    return MarkedJson("<｜tool▁call▁end｜>", _call)


def _call(body: str) -> list[Call] | None:
    head = _HEAD.match(body)
    if head is None:
        return None
    arguments = body[head.end() :]
    if head["old"]:
        arguments, fence, rest = arguments.rpartition(_FENCE)
        if not fence or rest.strip():
            return None
    return all_named([{"name": head["old"] or head["name"], "arguments": parsed_call(arguments)}])
