"""Calls between `<tool_call>` and its end mark: JSON as Qwen and Hermes write, and the two forms whose values have no
quotes."""

from __future__ import annotations

import re
from typing import Final

from gateway.tool_parsers.arguments import arguments_of, written
from gateway.tool_parsers.mark_search import Quotes
from gateway.tool_parsers.tool_parser import Call, Functions, Marked, OrJson, Reader, json_until

MARKS: Final = ("<tool_call>", "</tool_call>")
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_GLM_NAME = re.compile(r"\s*([^\s<]+)\s*")
_GLM_ARGUMENT = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def json_reader(_: Functions) -> Reader:
    """Reads `{"name": …, "arguments": …}`."""
    return json_until(MARKS[1])


def xml_reader(functions: Functions) -> Reader:
    """Reads `<function=…><parameter=…>…</parameter></function>`."""
    return OrJson(MARKS[1], Marked(MARKS[1], Quotes(), lambda body: _xml_call(body, functions)))


def glm_reader(functions: Functions) -> Reader:
    """Reads a name, and pairs of `<arg_key>` and `<arg_value>`."""
    quotes = Quotes({"<arg_value>": "</arg_value>"})
    return OrJson(MARKS[1], Marked(MARKS[1], quotes, lambda body: _glm_call(body, functions), ends_open=False))


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
