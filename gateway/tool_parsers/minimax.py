"""MiniMax's calls: elements whose tags are each preceded by a mark."""

from __future__ import annotations

import re
from typing import Any, Final, TypeAlias

from gateway.tool_parsers.arguments import Schema, written
from gateway.tool_parsers.tool_parser import Call, Functions, Marked, Reader

_MARK: Final = "]<]minimax[>["
BEGIN: Final = f'{_MARK}<invoke name="'
SECTION: Final = (f"{_MARK}<tool_call>", f"{_MARK}</tool_call>")
_TAG = re.compile(re.escape(_MARK) + r"<(?P<close>/?)(?P<name>[^<>/\s]+)>")
_DEEPEST: Final = 64
"""Elements in each other that are read."""


def minimax_reader(functions: Functions) -> Reader:
    """Reads `<invoke name="name"><key>value</key>…</invoke>`, from the name on."""
    return Marked(f"{_MARK}</invoke>", {}, lambda body: _call(body, functions), ends_open=False)


def _call(body: str, functions: Functions) -> list[Call] | None:
    name, mark, inner = body.partition('">')
    elements = _elements(inner) if mark else None
    if elements is None:
        return None
    schema = Schema(functions.get(name, {}))
    text = written({key: _converted(value, schema.of(key)) for key, value in elements})
    return None if text is None else [(name, text)]


_Elements: TypeAlias = "list[tuple[str, str | _Elements]]"
"""The children of an element, by name."""


def _elements(text: str) -> _Elements | None:
    """The elements of a text, nested, if each is closed and there is no other text."""
    open_: list[tuple[str, _Elements]] = [("", [])]
    at = 0
    for tag in _TAG.finditer(text):
        between, at = text[at : tag.start()], tag.end()
        name, inner = open_[-1]
        if not tag["close"]:
            if between.strip() or len(open_) > _DEEPEST:
                return None
            open_.append((tag["name"], []))
            continue
        if tag["name"] != name or len(open_) == 1 or (inner and between.strip()):
            return None
        open_.pop()
        open_[-1][1].append((name, inner or between))
    return open_[0][1] if len(open_) == 1 and not text[at:].strip() else None


def _converted(value: str | _Elements, schema: Schema) -> Any:
    """An element's value: a list has elements called `item`, an empty list or object has none."""
    kinds = schema.kinds()
    if isinstance(value, str):
        if kinds and not value.strip() and kinds <= {"array", "object", "null"}:
            return [] if "array" in kinds else {}
        return schema.value_of(value)
    if "array" in kinds or ("object" not in kinds and all(name == "item" for name, _ in value)):
        return [_converted(each, schema.of_items()) for _, each in value]
    return {name: _converted(each, schema.of(name)) for name, each in value}
