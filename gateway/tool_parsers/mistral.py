"""Mistral's calls, `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, or `[TOOL_CALLS]name[ARGS]{…}` for each, with
`[CALL_ID]id` before `[ARGS]` in some models."""

from __future__ import annotations

import re
from typing import Final

from gateway.tool_parsers.arguments import parsed_call
from gateway.tool_parsers.json_end import NO_JSON, NOT_YET, JsonEnd
from gateway.tool_parsers.tool_parser import LIST_HEAD, Stretch, all_named

BEGIN: Final = "[TOOL_CALLS]"
HEADS: Final = (
    re.compile(r"\s{0,64}(?P<name>[\w.-]{1,128})(?:\[CALL_ID\]\w{0,128})?\[ARGS\]\s{0,64}(?=\{)", re.ASCII),
    LIST_HEAD,
)
_HEAD = re.compile(r"\s{0,64}(?P<name>[\w.-]{0,128})(?:\[CALL_ID\]\w{0,128})?(?P<args>\[ARGS\]\s{0,64})?", re.ASCII)

_LONGEST_MARK: Final = len("[CALL_ID]")


class MistralReader:
    """Reads a list of calls, or a single one with name and arguments, behind `[TOOL_CALLS]`. JSON ends by itself, or
    where it is invalid."""

    def __init__(self) -> None:
        self._json: JsonEnd | None = None
        self._name: str | None = None
        self._begin = 0

    def read(self, text: str, *, last: bool) -> Stretch | None:
        """See `Reader`."""
        if self._json is None and (stretch := self._head(text, last=last)) is not None:
            return stretch
        end = NOT_YET if self._json is None else self._json.find(text, self._begin)
        if end == NOT_YET:
            return Stretch(len(text), []) if last else None
        if self._json is not None and end == NO_JSON:
            return Stretch(self._json.looked_at, [])
        value = parsed_call(text[self._begin : end])
        if self._name is not None:
            value = [{"name": self._name, "arguments": value}]
        return Stretch(end, all_named(value) or [])

    def _head(self, text: str, *, last: bool) -> Stretch | None:
        """Finds where the JSON begins; returns no calls if there cannot be any."""
        head = _HEAD.match(text)
        assert head is not None  # it may be of no signs
        name, rest = head["name"], text[head.end() : head.end() + _LONGEST_MARK + 1]
        if rest.startswith("{") if name and head["args"] else rest.startswith("[") and not name:
            self._name, self._begin, self._json = name or None, head.end(), JsonEnd()
            return None
        may_go_on = not rest or (name and any(mark.startswith(rest) for mark in ("[CALL_ID]", "[ARGS]")))
        return None if may_go_on and not last else Stretch(0, [])
