"""What a model writes around its calls and its reasoning, as its chat template shows it."""

from __future__ import annotations

from enum import Enum
from typing import Final


class ToolFormat(Enum):
    """How a model writes calls; the contract's TOOL_FORMAT_* say what each looks like."""

    JSON = "JSON"
    XML = "XML"
    GLM = "GLM"
    MISTRAL = "MISTRAL"
    KIMI = "KIMI"
    GEMMA = "GEMMA"
    LLAMA = "LLAMA"
    LFM = "LFM"
    MINIMAX = "MINIMAX"
    GRANITE = "GRANITE"
    APERTUS = "APERTUS"


_CALLS: Final = {
    "<tool_sep": None,  # Hunyuan's, beside marks that others have as well
    "<|tool_calls_section_begin|>": ToolFormat.KIMI,
    "]<]minimax[>[": ToolFormat.MINIMAX,
    "[TOOL_CALLS]": ToolFormat.MISTRAL,
    "<|tool_call|>": ToolFormat.GRANITE,
    "<|tools_prefix|>": ToolFormat.APERTUS,
    "<|tool_call>": ToolFormat.GEMMA,
    "<|tool_call_start|>": ToolFormat.LFM,
    "<|tool_list_start|>": ToolFormat.LFM,  # those that lay out no calls themselves
    "List of tools: [": ToolFormat.LFM,
    "<|header_start|>": ToolFormat.LLAMA,
    "<arg_key>": ToolFormat.GLM,
    "<function=": ToolFormat.XML,
    "<tool_call>": ToolFormat.JSON,
}
"""By a mark that a template of this format has; the first that it has counts."""
CALL: Final = ("<tool_call>", "</tool_call>")
AROUND_CALL: Final = {
    ToolFormat.JSON: CALL,
    ToolFormat.XML: CALL,
    ToolFormat.GLM: CALL,
    ToolFormat.GEMMA: ("<|tool_call>", "<tool_call|>"),
    ToolFormat.LFM: ("<|tool_call_start|>", "<|tool_call_end|>"),
}
"""The marks before a call and behind it, of formats in which callers look for JSON there as well."""

THINK: Final = ("<think>", "</think>")
_REASONING: Final = {
    "[THINK]": ("[THINK]", "[/THINK]"),
    "<|channel>": ("<|channel>thought", "<channel|>"),
    "<mm:think>": ("<mm:think>", "</mm:think>"),
    "<|inner_prefix|>": ("<|inner_prefix|>", "<|inner_suffix|>"),
    THINK[0]: THINK,
}
"""By a mark that a template has, what is written before reasoning and behind it; the first that it has counts."""

SHOWN: Final = frozenset(
    (
        *("<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>", "<channel|>", "<mm:think>", "</mm:think>"),
        *(*CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        *("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        *("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_call_start|>", "<|tool_call_end|>", "]<]minimax[>["),
        *("<|tool_call|>", "<|tools_prefix|>", "<|tools_suffix|>", "<|inner_prefix|>", "<|inner_suffix|>"),
    )
)
"""Marks of reasoning and of calls, which are in a text though a tokenizer may have them as special tokens, which texts
leave out: callers take texts apart by them."""


def tool_format(template: str) -> ToolFormat | None:
    """How a model with this chat template writes calls; None where it knows none, or another way."""
    return next((form for mark, form in _CALLS.items() if mark in template), None)


def reasoning_marks(template: str) -> tuple[str, str] | None:
    """What such a model writes before its reasoning and behind it; None where the template shows none."""
    return next((marks for mark, marks in _REASONING.items() if mark in template), None)
