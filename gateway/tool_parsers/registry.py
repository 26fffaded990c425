"""The parsers of calls, by the form that a model was taught."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from gateway.tool_parsers.arguments import parsed_call
from gateway.tool_parsers.listed import (
    APERTUS,
    GRANITE_BEGIN,
    HUNYUAN,
    PHI_BEGIN,
    apertus_reader,
    hunyuan_reader,
    marked_granite_reader,
    plain_list_reader,
)
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
from gateway.tool_parsers.tool_parser import (
    Call,
    Functions,
    Marked,
    NoCalls,
    OrJson,
    Reader,
    ToolParser,
    all_named,
    as_said,
)
from gateway.tool_parsers.xml import FUNCTION, bare_xml_reader, xml_reader

_KIMI: Final = ("<|tool_call_begin|>", "<|tool_call_end|>")
_KIMI_SECTION: Final = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_ONE: Final = (
    r'\{\s{0,64}"name"\s{0,64}:\s{0,64}"(?P<name>[^"\\]{1,128})"\s{0,64},\s{0,64}"arguments"\s{0,64}:\s{0,64}(?=\{)'
)
_JSON_HEAD = (re.compile(r"\s{0,64}" + _ONE),)
_LIST_HEAD = (re.compile(r"\s{0,64}(?:\[\s{0,64})?" + _ONE),)
_MISTRAL_HEAD = re.compile(r"\s{0,64}\[\s{0,64}" + _ONE)
_NAMED_HEAD = re.compile(r"\s{0,64}(?P<name>[\w.-]{1,128})(?:\[CALL_ID\]\w{0,128})?\[ARGS\]\s{0,64}(?=\{)", re.ASCII)
_KIMI_HEAD = re.compile(
    r"\s{0,64}(?:functions\.)?(?P<name>[\w.-]{1,128})(?::\d+)?\s{0,64}<\|tool_call_argument_begin\|>\s{0,64}(?=\{)"
)
_KIMI_NAME = re.compile(r"\s*(?:functions\.)?([\w.-]+)(?::\d+)?\s*")
_DEEPSEEK: Final = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_SECTION: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL = re.compile(
    r"\s*(?:\w+<｜tool▁sep｜>(?P<old>[\w.-]+)\s*```json\s*(?P<fenced>.*)```"
    r"|(?P<name>[\w.-]+)\s*<｜tool▁sep｜>(?P<bare>.*))\s*",
    re.DOTALL,
)
_DEEPSEEK_HEADS = (
    re.compile(r"\s{0,64}(?P<name>[\w.-]{1,128})\s{0,64}<｜tool▁sep｜>\s{0,64}(?=\{)"),
    re.compile(r"\s{0,64}\w{1,128}<｜tool▁sep｜>(?P<name>[\w.-]{1,128})\s{0,64}```json\s{0,64}(?=\{)"),
)
_INTERNLM: Final = ("<|action_start|><|plugin|>", "<|action_end|>")
_GEMMA: Final = ("<|tool_call>", "<tool_call|>")
_GEMMA_TEXTS: Final = Quotes({'<|"|>': '<|"|>'})


def _kimi_reader(_: Functions) -> Reader:
    return Marked(_KIMI[1], JSON_TEXTS, _kimi_call)


def _deepseek_reader(_: Functions) -> Reader:
    return Marked(_DEEPSEEK[1], JSON_TEXTS, _deepseek_call)


def _internlm_reader(functions: Functions) -> Reader:
    return OrJson(_INTERNLM[1], functions, NoCalls())


def _gemma_reader(functions: Functions) -> Reader:
    taught = Marked(_GEMMA[1], _GEMMA_TEXTS, lambda body: _gemma_call(body, functions))
    return OrJson(_GEMMA[1], functions, taught)


def _kimi_call(body: str) -> list[Call] | None:
    head, mark, arguments = body.partition("<|tool_call_argument_begin|>")
    name = _KIMI_NAME.fullmatch(head)
    if name is None or not mark:
        return None
    return all_named([{"name": name[1], "arguments": parsed_call(arguments) if arguments.strip() else {}}])


def _deepseek_call(body: str) -> list[Call] | None:
    call = _DEEPSEEK_CALL.fullmatch(body)
    if call is None:
        return None
    return all_named([{"name": call["old"] or call["name"], "arguments": parsed_call(call["fenced"] or call["bare"])}])


def _gemma_call(body: str, functions: Functions) -> list[Call] | None:
    try:
        return as_said([gemma_call(body)], functions)
    except NoLiteral:
        return None


TOOL_PARSERS: Final[Mapping[ToolFormat, ToolParser]] = {
    ToolFormat.JSON: ToolParser(MARKS[0], json_reader, ends_reasoning="call", heads=_JSON_HEAD),
    ToolFormat.XML: ToolParser(
        MARKS[0], xml_reader, ends_reasoning="call", bare=(FUNCTION, bare_xml_reader), heads=_JSON_HEAD
    ),
    ToolFormat.GLM: ToolParser(MARKS[0], glm_reader, ends_reasoning="call", heads=_JSON_HEAD),
    ToolFormat.MISTRAL: ToolParser(MISTRAL_BEGIN, lambda _: MistralReader(), heads=(_NAMED_HEAD, _MISTRAL_HEAD)),
    ToolFormat.KIMI: ToolParser(_KIMI[0], _kimi_reader, _KIMI_SECTION, ends_reasoning="mark", heads=(_KIMI_HEAD,)),
    ToolFormat.GEMMA: ToolParser(_GEMMA[0], _gemma_reader, ends_reasoning="mark", heads=_JSON_HEAD),
    ToolFormat.LLAMA: ToolParser("", LlamaReader),
    ToolFormat.LFM: ToolParser(LFM_MARKS[0], lfm_reader, heads=_JSON_HEAD),
    ToolFormat.MINIMAX: ToolParser(MINIMAX_BEGIN, minimax_reader, MINIMAX_SECTION),
    ToolFormat.GRANITE: ToolParser(
        GRANITE_BEGIN, plain_list_reader, bare=(MARKS[0], marked_granite_reader), heads=_LIST_HEAD
    ),
    ToolFormat.APERTUS: ToolParser(APERTUS[0], apertus_reader, ends_reasoning="mark"),
    ToolFormat.DEEPSEEK: ToolParser(_DEEPSEEK[0], _deepseek_reader, _DEEPSEEK_SECTION, heads=_DEEPSEEK_HEADS),
    ToolFormat.HUNYUAN: ToolParser(HUNYUAN[0], hunyuan_reader, heads=_LIST_HEAD),
    ToolFormat.PHI: ToolParser(PHI_BEGIN, plain_list_reader, heads=_LIST_HEAD),
    ToolFormat.INTERNLM: ToolParser(_INTERNLM[0], _internlm_reader),
}
