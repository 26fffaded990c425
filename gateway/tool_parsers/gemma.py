"""Gemma's calls, `call:name{key:value}` between two marks."""

from __future__ import annotations

from typing import Final

from gateway.tool_parsers.literals import NoLiteral, gemma_call
from gateway.tool_parsers.tool_parser import Call, Functions, Marked, OrJson, Reader, as_said

BEGIN: Final = "<|tool_call>"
_END: Final = "<tool_call|>"
_TEXTS: Final = {'<|"|>': '<|"|>'}


def gemma_reader(functions: Functions) -> Reader:
    """Reads up to `<tool_call|>`."""
    return OrJson(_END, functions, Marked(_END, _TEXTS, lambda body: _call(body, functions)))


def _call(body: str, functions: Functions) -> list[Call] | None:
    try:
        return as_said([gemma_call(body)], functions)
    except NoLiteral:
        return None
