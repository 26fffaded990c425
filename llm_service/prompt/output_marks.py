"""The marks that a model writes around its calls and its reasoning, as shown by its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final


class ToolFormat(Enum):
    """How a model writes calls; see the contract's TOOL_FORMAT_*."""

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
    DEEPSEEK = "DEEPSEEK"
    HUNYUAN = "HUNYUAN"
    PHI = "PHI"
    INTERNLM = "INTERNLM"
    NONE = "NONE"


_CALLS: Final = {
    "<tool_sep": None,  # Hunyuan's; its other marks are not unique
    "<|tool_calls_section_begin|>": ToolFormat.KIMI,
    "]<]minimax[>[": ToolFormat.MINIMAX,
    "[TOOL_CALLS]": ToolFormat.MISTRAL,
    "<|tool_call|>": ToolFormat.GRANITE,
    "<|tools_prefix|>": ToolFormat.APERTUS,
    "<｜tool▁calls▁begin｜>": ToolFormat.DEEPSEEK,
    "<tool_calls>": ToolFormat.HUNYUAN,
    "functools[": ToolFormat.PHI,
    "<|action_start|><|plugin|>": ToolFormat.INTERNLM,
    "<|tool_call>": ToolFormat.GEMMA,
    "<|tool_call_start|>": ToolFormat.LFM,
    "<|tool_list_start|>": ToolFormat.LFM,  # templates that do not print calls themselves
    "List of tools: [": ToolFormat.LFM,
    "<|header_start|>": ToolFormat.LLAMA,
    "<arg_key>": ToolFormat.GLM,
    "<function=": ToolFormat.XML,
    "<tool_call>": ToolFormat.JSON,
    '"parameters": dictionary of argument name': ToolFormat.LLAMA,  # Llama 3 has no mark of a call
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
"""The marks before and behind a call, for formats in which clients look for JSON as well."""

THINK: Final = ("<think>", "</think>")
UNREAD: Final = ("", "")
"""In place of marks: reasoning is not told apart from other text."""
_REASONING: Final = {
    "[THINK]": ("[THINK]", "[/THINK]"),
    "<|channel>": ("<|channel>thought", "<channel|>"),
    "<mm:think>": ("<mm:think>", "</mm:think>"),
    "<|inner_prefix|>": ("<|inner_prefix|>", "<|inner_suffix|>"),
    THINK[0]: THINK,
}
"""By a mark in the template: what is written before and behind reasoning. The first mark found counts."""

SHOWN: Final = frozenset(
    (
        *("<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>", "<channel|>", "<mm:think>", "</mm:think>"),
        *(*CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        *("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        *("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_call_start|>", "<|tool_call_end|>", "]<]minimax[>["),
        *("<|tool_call|>", "<|tools_prefix|>", "<|tools_suffix|>", "<|inner_prefix|>", "<|inner_suffix|>"),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        *("<tool_calls>", "</tool_calls>", "<|action_start|>", "<|plugin|>", "<|action_end|>"),
    )
)
"""Marks of reasoning and calls that are kept in decoded texts although a tokenizer may have them as special tokens:
clients parse texts by them."""


TOOL_CALL_PARSERS: Final[Mapping[str, ToolFormat]] = {
    "hermes": ToolFormat.JSON,
    "qwen3_xml": ToolFormat.XML,
    "qwen3_coder": ToolFormat.XML,
    "glm45": ToolFormat.GLM,
    "glm47": ToolFormat.GLM,
    "mistral": ToolFormat.MISTRAL,
    "kimi_k2": ToolFormat.KIMI,
    "gemma4": ToolFormat.GEMMA,
    "llama3_json": ToolFormat.LLAMA,
    "llama4_pythonic": ToolFormat.LLAMA,
    "pythonic": ToolFormat.LLAMA,
    "lfm2": ToolFormat.LFM,
    "minimax_m3": ToolFormat.MINIMAX,
    "granite": ToolFormat.GRANITE,
    "apertus": ToolFormat.APERTUS,
    "deepseek_v3": ToolFormat.DEEPSEEK,
    "deepseek_v31": ToolFormat.DEEPSEEK,
    "hunyuan_a13b": ToolFormat.HUNYUAN,
    "jamba": ToolFormat.HUNYUAN,
    "phi4_mini_json": ToolFormat.PHI,
    "internlm": ToolFormat.INTERNLM,
    "none": ToolFormat.NONE,
}
"""Tool formats by the names that operators give, which are vLLM's where vLLM has the format."""
REASONING_PARSERS: Final[Mapping[str, tuple[str, str]]] = {
    "qwen3": THINK,
    "deepseek_r1": THINK,
    "mistral": _REASONING["[THINK]"],
    "gemma4": _REASONING["<|channel>"],
    "minimax_m3": _REASONING["<mm:think>"],
    "apertus": _REASONING["<|inner_prefix|>"],
    "none": UNREAD,
}
"""Reasoning marks by the names that operators give."""


@dataclass(frozen=True, slots=True)
class OutputMarks:
    """The marks around a model's calls, None if it has none or another format, and around its reasoning, None if its
    template shows none."""

    tools: ToolFormat | None = None
    reasoning: tuple[str, str] | None = None

    @classmethod
    def of(cls, template: str) -> OutputMarks:
        """The marks of a model with this chat template."""
        return cls(
            next((form for mark, form in _CALLS.items() if mark in template), None),
            next((marks for mark, marks in _REASONING.items() if mark in template), None),
        )

    @classmethod
    def named(cls, tools: str, reasoning: str) -> OutputMarks:
        """The marks of the parsers that an operator has named; empty for other names, such as `auto`."""
        return cls(TOOL_CALL_PARSERS.get(tools), REASONING_PARSERS.get(reasoning))

    def or_else(self, other: OutputMarks) -> OutputMarks:
        """These marks, completed by the other's."""
        return OutputMarks(self.tools or other.tools, self.reasoning or other.reasoning)
