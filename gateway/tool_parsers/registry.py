"""The parsers of calls, by the form that a model was taught."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from gateway.tool_parsers.arguments import parsed
from gateway.tool_parsers.listed import APERTUS, GRANITE_BEGIN, apertus_reader, granite_reader, marked_granite_reader
from gateway.tool_parsers.literals import NoLiteral, gemma_call
from gateway.tool_parsers.mark_search import JSON_TEXTS, Quotes
from gateway.tool_parsers.minimax import BEGIN as MINIMAX_BEGIN
from gateway.tool_parsers.minimax import SECTION as MINIMAX_SECTION
from gateway.tool_parsers.minimax import minimax_reader
from gateway.tool_parsers.mistral import BEGIN as MISTRAL_BEGIN
from gateway.tool_parsers.mistral import MistralReader
from gateway.tool_parsers.pythonic import LFM_MARKS, LlamaReader, lfm_reader
from gateway.tool_parsers.tagged import MARKS, glm_reader, json_reader
from gateway.tool_parsers.tool_format import ToolFormat
from gateway.tool_parsers.tool_parser import Call, Functions, Marked, OrJson, Reader, ToolParser, all_named, as_said
from gateway.tool_parsers.xml import FUNCTION, bare_xml_reader, xml_reader

_KIMI: Final = ("<|tool_call_begin|>", "<|tool_call_end|>")
_KIMI_SECTION: Final = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_KIMI_NAME = re.compile(r"\s*(?:functions\.)?([\w.-]+)(?::\d+)?\s*")
_GEMMA: Final = ("<|tool_call>", "<tool_call|>")
_GEMMA_TEXTS: Final = Quotes({'<|"|>': '<|"|>'})


def _kimi_reader(_: Functions) -> Reader:
    return Marked(_KIMI[1], JSON_TEXTS, _kimi_call)


def _gemma_reader(functions: Functions) -> Reader:
    taught = Marked(_GEMMA[1], _GEMMA_TEXTS, lambda body: _gemma_call(body, functions))
    return OrJson(_GEMMA[1], functions, taught)


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


TOOL_PARSERS: Final[Mapping[ToolFormat, ToolParser]] = {
    ToolFormat.JSON: ToolParser(MARKS[0], json_reader, ends_reasoning="call"),
    ToolFormat.XML: ToolParser(MARKS[0], xml_reader, ends_reasoning="call", bare=(FUNCTION, bare_xml_reader)),
    ToolFormat.GLM: ToolParser(MARKS[0], glm_reader, ends_reasoning="call"),
    ToolFormat.MISTRAL: ToolParser(MISTRAL_BEGIN, lambda _: MistralReader()),
    ToolFormat.KIMI: ToolParser(_KIMI[0], _kimi_reader, _KIMI_SECTION, ends_reasoning="mark"),
    ToolFormat.GEMMA: ToolParser(_GEMMA[0], _gemma_reader, ends_reasoning="mark"),
    ToolFormat.LLAMA: ToolParser("", LlamaReader),
    ToolFormat.LFM: ToolParser(LFM_MARKS[0], lfm_reader),
    ToolFormat.MINIMAX: ToolParser(MINIMAX_BEGIN, minimax_reader, MINIMAX_SECTION),
    ToolFormat.GRANITE: ToolParser(GRANITE_BEGIN, granite_reader, bare=(MARKS[0], marked_granite_reader)),
    ToolFormat.APERTUS: ToolParser(APERTUS[0], apertus_reader, ends_reasoning="mark"),
}
