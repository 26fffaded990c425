"""Calls in a JSON list behind a mark: Granite's `{"name": …, "arguments": {…}}`, like Hunyuan's and Phi's, or Apertus'
`{name: {…}}`; or in a list that is the answer, since it must be calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from gateway.tool_parsers.arguments import parsed_call, written
from gateway.tool_parsers.json_end import NO_JSON, NOT_YET, JsonEnd
from gateway.tool_parsers.tool_parser import SPACE, Call, Functions, Reader, Stretch, all_named

GRANITE_BEGIN: Final = "<|tool_call|>"
HUNYUAN: Final = ("<tool_calls>", "</tool_calls>")
PHI_BEGIN: Final = "functools"
APERTUS: Final = ("<|tools_prefix|>", "<|tools_suffix|>")

_BEFORE: Final = re.compile(r"\s{0,64}[\[,]\s{0,64}(?=\{)")


class ListReader:
    """Reads one list, or a single element, and the `end` mark behind it, if there is one. JSON ends by itself, or where
    it is invalid."""

    def __init__(self, end: str, calls: Callable[[Any], list[Call] | None]) -> None:
        self._end, self._calls = end, calls
        self._json: JsonEnd | None = None
        self._begin, self._size = 0, NOT_YET

    def read(self, text: str, *, last: bool) -> Stretch | None:
        """See `Reader`."""
        if self._json is None:
            begun = text[: SPACE + 1]
            said = begun.lstrip()
            if not said and len(text) <= SPACE and not last:
                return None
            if said[:1] not in ("[", "{"):
                return Stretch(0, [])
            self._begin, self._json = len(begun) - len(said), JsonEnd()
        if self._size == NOT_YET:
            self._size = self._json.find(text, self._begin)
        if (size := self._size) == NOT_YET:
            return Stretch(len(text), []) if last else None
        if size == NO_JSON:
            return Stretch(self._json.looked_at, [])
        behind = text[size : size + SPACE + len(self._end)]
        rest = behind.lstrip()
        if self._end and not last and len(behind) - len(rest) <= SPACE and _begins(self._end, rest):
            return None
        value = parsed_call(text[self._begin : size])
        ended = len(behind) - len(rest) + len(self._end) if self._end and rest.startswith(self._end) else 0
        return Stretch(size + ended, self._calls(value if isinstance(value, list) else [value]) or [])


def plain_list_reader(_: Functions) -> Reader:
    """Reads what follows `<|tool_call|>`, or `functools`, where the answer usually ends."""
    return ListReader("", all_named)


def marked_granite_reader(_: Functions) -> Reader:
    """The same behind `<tool_call>`, which some of them write instead."""
    return ListReader("</tool_call>", all_named)


def hunyuan_reader(_: Functions) -> Reader:
    """Reads up to `</tool_calls>`."""
    return ListReader(HUNYUAN[1], all_named)


def apertus_reader(_: Functions) -> Reader:
    """Reads up to `<|tools_suffix|>`."""
    return ListReader(APERTUS[1], _apertus_calls)


class ForcedReader:
    """Reads one call of an answer that is a list of calls, with the bracket or comma before it."""

    def __init__(self, _: Functions) -> None:
        self._json: JsonEnd | None = None
        self._begin = 0

    def read(self, text: str, *, last: bool) -> Stretch | None:
        """See `Reader`."""
        if self._json is None and (before := _BEFORE.match(text)):
            self._begin, self._json = before.end(), JsonEnd()
        size = NOT_YET if self._json is None else self._json.find(text, self._begin)
        if size < 0:
            return Stretch(len(text), []) if last else None
        return Stretch(size, all_named([parsed_call(text[self._begin : size])]) or [])


def _begins(mark: str, text: str) -> bool:
    """Whether a text may become the mark, and is not it yet."""
    return len(text) < len(mark) and mark.startswith(text)


def _apertus_calls(value: list[Any]) -> list[Call] | None:
    found: list[Call] = []
    for each in value:
        if not isinstance(each, dict) or len(each) != 1:
            return None
        [(name, arguments)] = each.items()
        text = written(arguments) if isinstance(arguments, dict) else None
        if text is None:
            return None
        found.append((name, text))
    return found or None
