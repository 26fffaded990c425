"""Parsers of calls in one format, and what many of them share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias

from gateway.tool_parsers.arguments import Schema, parsed_call, written
from gateway.tool_parsers.json_end import NO_JSON, NOT_YET, JsonEnd
from gateway.tool_parsers.mark_search import MarkSearch

Functions: TypeAlias = Mapping[str, dict[str, Any]]
"""The schemas of functions' parameters, by name."""
Call: TypeAlias = tuple[str, str]
"""A function's name, and its arguments as JSON."""

_NAMED: Final = r'\{\s{0,64}"name"\s{0,64}:\s{0,64}"(?P<name>[^"\\]{1,128})"\s{0,64},\s{0,64}'
_ARGUMENTS: Final = r'"arguments"\s{0,64}:\s{0,64}(?=\{)'
JSON_HEAD: Final = re.compile(r"\s{0,64}" + _NAMED + _ARGUMENTS)
"""The text before the arguments of `{"name": …, "arguments": {…}}`."""
LIST_HEAD: Final = re.compile(r"\s{0,64}\[\s{0,64}" + _NAMED + _ARGUMENTS)
"""The same of the first in a list."""
FORCED_HEAD: Final = re.compile(r"\s{0,64}[\[,]\s{0,64}" + _NAMED + r'"parameters"\s{0,64}:\s{0,64}(?=\{)')
"""The same of one in a list `[{"name": …, "parameters": {…}}, …]`, with what separates it from the one before."""
SPACE: Final = 64
"""White space before a call, at most."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """What the first `size` characters of a text are: calls, or text if there are none."""

    size: int
    calls: list[Call]


class Reader(Protocol):
    """Reads one mark's calls."""

    def read(self, text: str, *, last: bool) -> Stretch | None:
        """Parses what follows the mark; each text begins with the one before. None: more text is needed; `last`: there
        will be no more."""


@dataclass(frozen=True, slots=True)
class ToolParser:
    """The mark before a call, and the reader for what follows; without a mark, the whole answer is calls. In some
    formats calls are in a section, between two marks of its own. If models call while they think, without ending that
    first, the mark ends reasoning, or a complete call of an offered function. `bare` is what a call begins with if the
    model left out its mark. `heads`: the text between the mark and the arguments, if these are JSON, so that streams
    can report them early."""

    begin: str
    reader: Callable[[Functions], Reader]
    section: tuple[str, str] | None = None
    ends_reasoning: Literal["mark", "call"] | None = None
    bare: tuple[str, Callable[[Functions], Reader]] | None = None
    heads: tuple[re.Pattern[str], ...] = ()


class Marked:
    """Reads a call up to its end mark; without one, the rest of the answer, unless a call is only complete with the
    mark."""

    def __init__(
        self, end: str, quotes: Mapping[str, str], calls: Callable[[str], list[Call] | None], *, ends_open: bool = True
    ) -> None:
        self._end, self._calls, self._ends_open = end, calls, ends_open
        self._search = MarkSearch(end, quotes)

    def read(self, text: str, *, last: bool) -> Stretch | None:
        """See `Reader`. At the last, a mark within a quotation that has no end is one."""
        end = self._search.find(text)
        if end < 0 and last:
            end = text.find(self._end)
        if end < 0:
            if not last:
                return None
            return Stretch(len(text), (self._calls(text) if self._ends_open else None) or [])
        return Stretch(end + len(self._end), self._calls(text[:end]) or [])


class MarkedJson:
    """Reads a call that is JSON, or has JSON behind a name, up to its end mark; without one, the rest of the answer.
    End marks inside the JSON's strings do not count, unless it is invalid: then everything up to the first one is text,
    so that several malformed calls are read only once."""

    def __init__(self, end: str, calls: Callable[[str], list[Call] | None]) -> None:
        self._end, self._calls = end, calls
        self._first = re.compile(r"[{\"]|" + re.escape(end))
        self._json = JsonEnd()
        self._begin = -1  # of the JSON
        self._at = 0  # nothing that is looked for stands before this place
        self._has_no_more_json = False

    def read(self, text: str, *, last: bool) -> Stretch | None:
        """See `Reader`. At the last, a mark within a text that has no end is one."""
        if not self._has_no_more_json:
            self._look_for_json(text)
        end = text.find(self._end, self._at) if self._has_no_more_json else text.find(self._end) if last else -1
        if end >= 0:
            return Stretch(end + len(self._end), self._calls(text[:end]) or [])
        if last:
            return Stretch(len(text), self._calls(text) or [])
        if self._has_no_more_json:
            self._at = max(self._at, len(text) - len(self._end) + 1)
        return None

    def _look_for_json(self, text: str) -> None:
        if self._begin < 0:
            first = self._first.search(text, self._at)
            if first is None:
                self._at = max(self._at, len(text) - len(self._end) + 1)
                return
            self._at, self._begin = 0, first.start()
            self._has_no_more_json = first[0] != "{"
        if not self._has_no_more_json and (place := self._json.find(text, self._begin)) != NOT_YET:
            self._at = 0 if place == NO_JSON else place
            self._has_no_more_json = True


class NoCalls:
    """Reads nothing: everything is text."""

    def read(self, text: str, *, last: bool) -> Stretch | None:  # noqa: ARG002
        """See `Reader`."""
        return Stretch(0, [])


class OrJson:
    """Reads what precedes an end mark: JSON, `{"name": …, "arguments": …}`, in which strict functions are called
    whatever the model's format, or the model's format."""

    def __init__(self, end: str, functions: Functions, taught: Reader) -> None:
        self._json = MarkedJson(end, lambda body: _one(parsed_call(body), functions))
        self._taught = taught
        self._chosen: Reader | None = None

    def read(self, text: str, *, last: bool) -> Stretch | None:
        """See `Reader`."""
        if self._chosen is None:
            said = text[: SPACE + 1].lstrip()
            if not said:
                return Stretch(0, []) if last or len(text) > SPACE else None
            self._chosen = self._json if said.startswith("{") else self._taught
        return self._chosen.read(text, last=last)


def _one(call: Any, functions: Functions) -> list[Call] | None:
    """A call of a function; arguments may be missing if there are none."""
    if isinstance(call, dict) and call.keys() == {"name"} and call["name"] in functions:
        call = {**call, "arguments": {}}
    return all_named([call])


def all_named(calls: Any) -> list[Call] | None:
    """Calls of a list, one or more, each an object with a function's name and its arguments."""
    found = [call for each in calls if (call := _named(each)) is not None] if isinstance(calls, list) else []
    return found if found and len(found) == len(calls) else None


def _named(call: Any) -> Call | None:
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str):
        return None
    arguments = next((call[key] for key in ("arguments", "parameters") if isinstance(call.get(key), dict)), None)
    return None if arguments is None or (text := written(arguments)) is None else (name, text)


def as_said(calls: list[tuple[str, dict[str, Any]]], functions: Functions) -> list[Call] | None:
    """Calls whose arguments are values already, converted to the functions' types."""
    found: list[Call] = []
    for name, arguments in calls:
        schema = Schema(functions.get(name, {}))
        text = written({key: schema.of(key).as_said(value) for key, value in arguments.items()})
        if text is None:
            return None
        found.append((name, text))
    return found
