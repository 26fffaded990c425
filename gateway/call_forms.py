"""How calls are written: the mark that one begins with, and what reads it from there to its end."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

from gateway.call_arguments import arguments_of, parsed, written
from gateway.mark_search import JSON_TEXTS, MarkSearch, Quotes
from gateway.tool_format import ToolFormat

Functions: TypeAlias = Mapping[str, dict[str, Any]]
"""The schemas of functions' parameters, by name."""
Call: TypeAlias = tuple[str, str]
"""A function's name, and its arguments as JSON."""

_CALL: Final = ("<tool_call>", "</tool_call>")
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_GLM_NAME = re.compile(r"\s*([^\s<]+)\s*")
_GLM_ARGUMENT = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Stretch:
    """What the first `size` characters of a text are: calls, or words, where there are none."""

    size: int
    calls: list[Call]


class Reader(Protocol):
    """Reads one mark's calls."""

    def read(self, text: str, *, last: bool) -> Stretch | None:
        """What stands behind the mark; each text begins with the one before. None: more has to come, of which `last`
        says that it will not."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """The mark before a call, and who reads on from there."""

    begin: str
    reader: Callable[[Functions], Reader]


class _Marked:
    """Reads a call up to its end mark; where that never comes, the whole rest, unless a call is only whole with it."""

    def __init__(
        self, end: str, quotes: Quotes, calls: Callable[[str], list[Call] | None], *, ends_open: bool = True
    ) -> None:
        self._end, self._calls, self._ends_open = end, calls, ends_open
        self._search = MarkSearch([end], quotes)

    def read(self, text: str, *, last: bool) -> Stretch | None:
        """See `Reader`. At the last, a mark within a quotation that has no end is one."""
        mark = next(self._search.found(text, last=last), None)
        end = text.find(self._end) if mark is None and last else mark.start() if mark else -1
        if end < 0:
            if not last:
                return None
            return Stretch(len(text), (self._calls(text) if self._ends_open else None) or [])
        return Stretch(end + len(self._end), self._calls(text[:end]) or [])


class _Tagged:
    """Reads what stands between `<tool_call>` and its end mark. Strict functions are called by JSON there, whatever the
    model was taught."""

    def __init__(self, taught: Reader) -> None:
        self._taught = taught
        self._chosen: Reader | None = None

    def read(self, text: str, *, last: bool) -> Stretch | None:
        """See `Reader`."""
        if self._chosen is None:
            said = text.lstrip()
            if not said and not last:
                return None
            self._chosen = _json_reader() if said.startswith("{") else self._taught
        return self._chosen.read(text, last=last)


def _json_reader() -> Reader:
    return _Marked(_CALL[1], JSON_TEXTS, _json_call)


def _json_call(body: str) -> list[Call] | None:
    call = _named(parsed(body))
    return None if call is None else [call]


def _named(call: Any) -> Call | None:
    """A call that is an object with a function's name and its arguments."""
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str):
        return None
    arguments = next((call[key] for key in ("arguments", "parameters") if isinstance(call.get(key), dict)), None)
    return None if arguments is None or (text := written(arguments)) is None else (name, text)


def _xml_call(body: str, functions: Functions) -> list[Call] | None:
    if (function := _FUNCTION.fullmatch(body)) is None:
        return None
    return _untyped(function[1].strip(), function[2], _PARAMETER, functions)


def _glm_call(body: str, functions: Functions) -> list[Call] | None:
    name = _GLM_NAME.match(body)
    if name is None or (name.end() == len(body) and name[1] not in functions):  # else any word would be a call
        return None
    return _untyped(name[1], body[name.end() :], _GLM_ARGUMENT, functions)


def _untyped(name: str, body: str, argument: re.Pattern[str], functions: Functions) -> list[Call] | None:
    """A call whose arguments have no quotes."""
    pairs: dict[str, str] = {}
    at = 0
    while found := argument.match(body, at):
        pairs[found[1].strip()] = found[2]
        at = found.end()
    text = None if body[at:].strip() else written(arguments_of(functions.get(name, {}), pairs))
    return None if text is None else [(name, text)]


def _xml_reader(functions: Functions) -> Reader:
    return _Tagged(_Marked(_CALL[1], Quotes(), lambda body: _xml_call(body, functions)))


def _glm_reader(functions: Functions) -> Reader:
    quotes = Quotes({"<arg_value>": "</arg_value>"})
    return _Tagged(_Marked(_CALL[1], quotes, lambda body: _glm_call(body, functions), ends_open=False))


FORMS: Final[Mapping[ToolFormat, CallForm]] = {
    ToolFormat.JSON: CallForm(_CALL[0], lambda _: _json_reader()),
    ToolFormat.XML: CallForm(_CALL[0], _xml_reader),
    ToolFormat.GLM: CallForm(_CALL[0], _glm_reader),
}
