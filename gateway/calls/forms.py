"""The forms of calls that are known."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from gateway.calls.arguments import parsed
from gateway.calls.form import Call, CallForm, Functions, Marked, OrJson, Reader, all_named, as_said
from gateway.calls.literals import NoLiteral, gemma_call
from gateway.calls.mark_search import JSON_TEXTS, Quotes
from gateway.calls.minimax import BEGIN as MINIMAX_BEGIN
from gateway.calls.minimax import SECTION as MINIMAX_SECTION
from gateway.calls.minimax import minimax_reader
from gateway.calls.mistral import BEGIN as MISTRAL_BEGIN
from gateway.calls.mistral import MistralReader
from gateway.calls.pythonic import LFM_MARKS, LlamaReader, lfm_reader
from gateway.calls.tagged import MARKS, glm_reader, json_reader, xml_reader
from gateway.calls.tool_format import ToolFormat

_KIMI: Final = ("<|tool_call_begin|>", "<|tool_call_end|>")
_KIMI_SECTION: Final = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_KIMI_NAME = re.compile(r"\s*(?:functions\.)?([\w.-]+)(?::\d+)?\s*")
_GEMMA: Final = ("<|tool_call>", "<tool_call|>")
_GEMMA_TEXTS: Final = Quotes({'<|"|>': '<|"|>'})


def _kimi_reader(_: Functions) -> Reader:
    return Marked(_KIMI[1], JSON_TEXTS, _kimi_call)


def _gemma_reader(functions: Functions) -> Reader:
    return OrJson(_GEMMA[1], Marked(_GEMMA[1], _GEMMA_TEXTS, lambda body: _gemma_call(body, functions)))


def _kimi_call(body: str) -> list[Call] | None:
    head, mark, arguments = body.partition("<|tool_call_argument_begin|>")
    name = _KIMI_NAME.fullmatch(head)
    if name is None or not mark:
        return None
    return all_named([{"name": name[1], "arguments": parsed(arguments) if arguments.strip() else {}}])


def _gemma_call(body: str, functions: Functions) -> list[Call] | None:
    try:
        return as_said([gemma_call(body)], functions)
    except NoLiteral:
        return None


FORMS: Final[Mapping[ToolFormat, CallForm]] = {
    ToolFormat.JSON: CallForm(MARKS[0], json_reader),
    ToolFormat.XML: CallForm(MARKS[0], xml_reader),
    ToolFormat.GLM: CallForm(MARKS[0], glm_reader),
    ToolFormat.MISTRAL: CallForm(MISTRAL_BEGIN, lambda _: MistralReader()),
    ToolFormat.KIMI: CallForm(_KIMI[0], _kimi_reader, _KIMI_SECTION, ends_reasoning=True),
    ToolFormat.GEMMA: CallForm(_GEMMA[0], _gemma_reader, ends_reasoning=True),
    ToolFormat.LLAMA: CallForm("", LlamaReader),
    ToolFormat.LFM: CallForm(LFM_MARKS[0], lfm_reader),
    ToolFormat.MINIMAX: CallForm(MINIMAX_BEGIN, minimax_reader, MINIMAX_SECTION),
}
