"""DeepSeek's calls in a section of them: a name, a separator and the arguments as JSON; before V3.1, a kind, the
separator, the name, and the arguments in a fence."""

from __future__ import annotations

import re
from typing import Final

from gateway.tool_parsers.arguments import parsed_call
from gateway.tool_parsers.mark_search import JSON_TEXTS
from gateway.tool_parsers.tool_parser import Call, Functions, Marked, Reader, all_named

BEGIN: Final = "<｜tool▁call▁begin｜>"
SECTION: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
HEADS: Final = (
    re.compile(r"\s{0,64}(?P<name>[\w.-]{1,128})\s{0,64}<｜tool▁sep｜>\s{0,64}(?=\{)"),
    re.compile(r"\s{0,64}\w{1,128}<｜tool▁sep｜>(?P<name>[\w.-]{1,128})\s{0,64}```json\s{0,64}(?=\{)"),
)
_CALL = re.compile(
    r"\s*(?:\w+<｜tool▁sep｜>(?P<old>[\w.-]+)\s*```json\s*(?P<fenced>.*)```"
    r"|(?P<name>[\w.-]+)\s*<｜tool▁sep｜>(?P<bare>.*))\s*",
    re.DOTALL,
)


def deepseek_reader(_: Functions) -> Reader:
    """Reads up to `<｜tool▁call▁end｜>`."""
    return Marked("<｜tool▁call▁end｜>", JSON_TEXTS, _call)


def _call(body: str) -> list[Call] | None:
    call = _CALL.fullmatch(body)
    if call is None:
        return None
    return all_named([{"name": call["old"] or call["name"], "arguments": parsed_call(call["fenced"] or call["bare"])}])
