"""The parsers of calls, by the form that a model was taught."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.tool_parsers import deepseek, gemma, kimi, minimax, mistral
from gateway.tool_parsers.listed import (
    APERTUS,
    GRANITE_BEGIN,
    HUNYUAN,
    PHI_BEGIN,
    ForcedReader,
    apertus_reader,
    hunyuan_reader,
    marked_granite_reader,
    plain_list_reader,
)
from gateway.tool_parsers.pythonic import LFM_MARKS, LlamaReader, lfm_reader
from gateway.tool_parsers.tagged import INTERNLM, MARKS, glm_reader, internlm_reader, json_reader
from gateway.tool_parsers.tool_format import ToolFormat
from gateway.tool_parsers.tool_parser import FORCED_HEAD, JSON_HEAD, LIST_HEAD, ToolParser
from gateway.tool_parsers.xml import FUNCTION, bare_xml_reader, xml_reader

_JSON_HEADS = (JSON_HEAD,)
_LIST_HEADS = (LIST_HEAD, JSON_HEAD)

TOOL_PARSERS: Final[Mapping[ToolFormat, ToolParser]] = {
    ToolFormat.JSON: ToolParser(MARKS[0], json_reader, ends_reasoning="call", heads=_JSON_HEADS),
    ToolFormat.XML: ToolParser(
        MARKS[0], xml_reader, ends_reasoning="call", bare=(FUNCTION, bare_xml_reader), heads=_JSON_HEADS
    ),
    ToolFormat.GLM: ToolParser(MARKS[0], glm_reader, ends_reasoning="call", heads=_JSON_HEADS),
    ToolFormat.MISTRAL: ToolParser(mistral.BEGIN, lambda _: mistral.MistralReader(), heads=mistral.HEADS),
    ToolFormat.KIMI: ToolParser(kimi.BEGIN, kimi.kimi_reader, kimi.SECTION, ends_reasoning="mark", heads=kimi.HEADS),
    ToolFormat.GEMMA: ToolParser(gemma.BEGIN, gemma.gemma_reader, ends_reasoning="mark", heads=_JSON_HEADS),
    ToolFormat.LLAMA: ToolParser("", LlamaReader),
    ToolFormat.LFM: ToolParser(LFM_MARKS[0], lfm_reader, heads=_JSON_HEADS),
    ToolFormat.MINIMAX: ToolParser(minimax.BEGIN, minimax.minimax_reader, minimax.SECTION),
    ToolFormat.GRANITE: ToolParser(
        GRANITE_BEGIN, plain_list_reader, bare=(MARKS[0], marked_granite_reader), heads=_LIST_HEADS
    ),
    ToolFormat.APERTUS: ToolParser(APERTUS[0], apertus_reader, ends_reasoning="mark"),
    ToolFormat.DEEPSEEK: ToolParser(deepseek.BEGIN, deepseek.deepseek_reader, deepseek.SECTION, heads=deepseek.HEADS),
    ToolFormat.HUNYUAN: ToolParser(HUNYUAN[0], hunyuan_reader, heads=_LIST_HEADS),
    ToolFormat.PHI: ToolParser(PHI_BEGIN, plain_list_reader, heads=_LIST_HEADS),
    ToolFormat.INTERNLM: ToolParser(INTERNLM[0], internlm_reader),
    ToolFormat.LIST: ToolParser("", ForcedReader, heads=(FORCED_HEAD,)),
}
