"""Calls as Qwen3-Coder and Qwen3.5 write them, `<function=…><parameter=…>…</parameter></function>`, without quotes, and
with the tags that these models leave out."""

from __future__ import annotations

import re
from typing import Final

from gateway.tool_parsers.arguments import arguments_of, written
from gateway.tool_parsers.tagged import MARKS
from gateway.tool_parsers.tool_parser import Call, Functions, OrJson, Reader, Stretch

FUNCTION: Final = "<function="
_END: Final = MARKS[1]
_TAG = re.compile(rf"<parameter=|</parameter>|{_END}")
_LONGEST_TAG: Final = len("</parameter>")
_HEAD = re.compile(r"\s*<function=([^>\n]+)>\s*")
_FUNCTION_END = re.compile(r"\s*(</function>)?\s*")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?")
_VALUE_TAG = re.compile(r"<parameter=|(\n?</parameter>)(\s*(?=<parameter=|</function>|<function=|\Z))?")


def xml_reader(functions: Functions) -> Reader:
    """Reads one function or several, up to the end mark."""
    return OrJson(_END, functions, _XmlReader(functions))


def bare_xml_reader(functions: Functions) -> Reader:
    """Reads on behind `<function=` of a call without `<tool_call>`, for offered functions."""
    return _BareReader(functions)


class _XmlReader:
    """Reads a text that begins with a function; end marks inside a parameter's value do not count. Values may contain
    parameters, for example of an example."""

    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self._begins = False
        self._at = self._depth = 0

    def read(self, text: str, *, last: bool) -> Stretch | None:
        """See `Reader`. At the last, an end mark in a value that has no end is one."""
        if not self._begins:
            begun = text.lstrip()[: len(FUNCTION)]
            if begun != FUNCTION:
                return None if FUNCTION.startswith(begun) and not last else Stretch(0, [])
            self._begins = True
        return self._read(text, last=last)

    def _read(self, text: str, *, last: bool, before: str = "") -> Stretch | None:
        while tag := _TAG.search(text, self._at):
            self._at = tag.end()
            if tag[0] != _END:
                self._depth = max(0, self._depth + (1 if tag[0][1] == "p" else -1))
            elif not self._depth:
                return Stretch(tag.end(), self._calls(before + text[: tag.start()]) or [])
        self._at = max(self._at, len(text) - _LONGEST_TAG + 1)
        if not last:
            return None
        body, mark, _ = text.partition(_END)
        return Stretch(len(body) + len(mark), self._calls(before + body, ended=bool(mark)) or [])

    def _calls(self, body: str, *, ended: bool = True) -> list[Call] | None:
        """The calls in a body. The end of a function may be missing if another begins, or the call is `ended`."""
        calls: list[Call] = []
        at = 0
        while head := _HEAD.match(body, at):
            name, pairs, at = head[1].strip(), {}, head.end()
            while parameter := _PARAMETER.match(body, at):
                end = _value_end(body, parameter.end())
                if end is None:
                    return None
                pairs[parameter[1].strip()] = body[parameter.end() : end.start()]
                at = end.end()
            closed = _FUNCTION_END.match(body, at)
            text = written(arguments_of(self._functions.get(name, {}), pairs))
            if closed is None or text is None:
                return None
            calls.append((name, text))
            at = closed.end()
            if at == len(body) and not (closed[1] or ended):
                return None
        return calls if at == len(body) else None


def _value_end(body: str, at: int) -> re.Match[str] | None:
    """Where a value ends: after as many ends as it has beginnings, where a parameter, or nothing, may follow."""
    depth = 1
    for tag in _VALUE_TAG.finditer(body, at):
        depth = max(0, depth + (-1 if tag[1] else 1))
        if not depth and tag[2] is not None:
            return tag
    return None


class _BareReader(_XmlReader):
    """Reads the same from a function's name on."""

    def read(self, text: str, *, last: bool) -> Stretch | None:
        """See `Reader`."""
        if not self._begins:
            name, mark, _ = text.partition(">")
            if not mark and not last and any(each.startswith(name) for each in self._functions):
                return None
            if not mark or name not in self._functions:
                return Stretch(0, [])
            self._begins = True
        read = self._read(text, last=last, before=FUNCTION)
        if read is None or all(name in self._functions for name, _ in read.calls):
            return read
        return Stretch(read.size, [])
