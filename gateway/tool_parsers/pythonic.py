"""Calls in Python syntax, `[name(key=value, …), …]`: LFM's, and Llama's, which have no marks and may be JSON as
well."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from gateway.tool_parsers.arguments import parsed
from gateway.tool_parsers.literals import NoLiteral, python_calls
from gateway.tool_parsers.tool_parser import Call, Functions, Marked, OrJson, Reader, Stretch, all_named, as_said

LFM_MARKS: Final = ("<|tool_call_start|>", "<|tool_call_end|>")
_BEGINNING = re.compile(r"\s{0,64}(?:\[\s{0,64}(?P<name>[\w.-]{0,128})(?P<call>\()?|\{\s{0,64}(?P<key>\"\w{0,8}\"?)?)?")
_KEYS: Final = ('"name"', '"type"')
_JSON: Final = json.JSONDecoder()
_NEXT_OBJECT = re.compile(r"[\s;]*(?=\{)")


def lfm_reader(functions: Functions) -> Reader:
    """Reads what is between LFM's marks, which strings do not contain."""
    end = LFM_MARKS[1]
    taught = Marked(end, {}, lambda body: _calls(body.strip(), functions) or all_named(parsed(body)))
    return OrJson(end, functions, taught)


class LlamaReader:
    """Reads a whole answer without marks, which is calls or text."""

    def __init__(self, functions: Functions) -> None:
        self._functions = functions

    def read(self, text: str, *, last: bool) -> Stretch | None:
        """See `Reader`. Most texts are recognised by their beginning."""
        if not last:
            return None if self._may_be_calls(text) else Stretch(0, [])
        calls = _json_objects(text) or _calls(text.strip(), self._functions) or []
        known = all(name in self._functions for name, _ in calls)
        return Stretch(len(text), calls) if calls and known else Stretch(0, [])

    def _may_be_calls(self, text: str) -> bool:
        begun = _BEGINNING.match(text)
        assert begun is not None  # it may be of no signs
        name, key, is_all = begun["name"], begun["key"], begun.end() == len(text)
        if begun["call"]:
            return name in self._functions
        if name:
            return is_all and any(function.startswith(name) for function in self._functions)
        return key in _KEYS or (is_all and (key is None or any(known.startswith(key) for known in _KEYS)))


def _json_objects(text: str) -> list[Call] | None:
    """Calls separated by semicolons or nothing."""
    values: list[Any] = []
    at = 0
    while begin := _NEXT_OBJECT.match(text, at):
        try:
            value, at = _JSON.raw_decode(text, begin.end())
        except (ValueError, RecursionError):
            return None
        values.append(value)
    return None if text[at:].strip("; \n") else all_named(values)


def _calls(text: str, functions: Functions) -> list[Call] | None:
    try:
        return as_said(python_calls(text), functions)
    except NoLiteral:
        return None
