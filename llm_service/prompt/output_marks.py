"""What a model writes around its calls and its reasoning, as its chat template shows it."""

from __future__ import annotations

from enum import Enum
from typing import Final


class ToolFormat(Enum):
    """How a model writes calls; the contract's TOOL_FORMAT_* say what each looks like."""

    JSON = "JSON"
    XML = "XML"
    GLM = "GLM"


TAGGED: Final = frozenset((ToolFormat.JSON, ToolFormat.XML, ToolFormat.GLM))
"""Formats in which a call stands between the marks `CALL`."""
_CALLS: Final = {
    "<arg_key>": ToolFormat.GLM,
    "<function=": ToolFormat.XML,
    "<tool_call>": ToolFormat.JSON,
}
"""By a mark that a template of this format has; the first that it has counts."""
THINK: Final = ("<think>", "</think>")
_REASONING: Final = (THINK,)

CALL: Final = ("<tool_call>", "</tool_call>")
SHOWN: Final = frozenset((*(mark for pair in _REASONING for mark in pair), *CALL, "<arg_key>", "</arg_key>"))
"""Marks of reasoning and of calls, which are in a text though a tokenizer may have them as special tokens, which texts
leave out: callers take texts apart by them."""


def tool_format(template: str) -> ToolFormat | None:
    """How a model with this chat template writes calls; None where it knows none, or another way."""
    return next((form for mark, form in _CALLS.items() if mark in template), None)


def reasoning_marks(template: str) -> tuple[str, str] | None:
    """What such a model writes before its reasoning and behind it; None where the template shows none."""
    return next((marks for marks in _REASONING if marks[0] in template), None)
