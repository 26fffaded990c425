"""The functions that a chat offers to the model, and how the model writes calls of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json

from common.errors import InvalidInput
from common.json_schema.calls import of_arguments, one_call
from common.json_schema.whitespace import leniently
from gateway.api.chat_request import AllowedTools, ChatRequest, Function, NamedTool, Tool
from gateway.tool_parsers.tool_format import ToolFormat
from twinlens.v1 import llm_pb2

_FORMATS: dict[int, ToolFormat] = {
    llm_pb2.TOOL_FORMAT_JSON: ToolFormat.JSON,
    llm_pb2.TOOL_FORMAT_XML: ToolFormat.XML,
    llm_pb2.TOOL_FORMAT_GLM: ToolFormat.GLM,
    llm_pb2.TOOL_FORMAT_MISTRAL: ToolFormat.MISTRAL,
    llm_pb2.TOOL_FORMAT_KIMI: ToolFormat.KIMI,
    llm_pb2.TOOL_FORMAT_GEMMA: ToolFormat.GEMMA,
    llm_pb2.TOOL_FORMAT_LLAMA: ToolFormat.LLAMA,
    llm_pb2.TOOL_FORMAT_LFM: ToolFormat.LFM,
    llm_pb2.TOOL_FORMAT_MINIMAX: ToolFormat.MINIMAX,
    llm_pb2.TOOL_FORMAT_GRANITE: ToolFormat.GRANITE,
    llm_pb2.TOOL_FORMAT_APERTUS: ToolFormat.APERTUS,
    llm_pb2.TOOL_FORMAT_DEEPSEEK: ToolFormat.DEEPSEEK,
    llm_pb2.TOOL_FORMAT_HUNYUAN: ToolFormat.HUNYUAN,
    llm_pb2.TOOL_FORMAT_PHI: ToolFormat.PHI,
    llm_pb2.TOOL_FORMAT_INTERNLM: ToolFormat.INTERNLM,
    llm_pb2.TOOL_FORMAT_NONE: ToolFormat.NONE,
}


def tool_format(body: ChatRequest, info: llm_pb2.LlmServiceGetInfoResponse | None) -> ToolFormat:
    """The format of calls: the model's own, unless the answer must be calls. `info` is its service's description, None
    if there is no service. Raises InvalidInput if the format is not stated."""
    if not offered(body):
        return ToolFormat.NONE
    if isinstance(body.tool_choice, NamedTool):
        return ToolFormat.ARGUMENTS
    if body.must_call:
        return ToolFormat.LIST
    written = ToolFormat.JSON if info is None else _FORMATS.get(info.tool_format)
    if written is None:
        raise InvalidInput("it is not known how this model writes calls", reason="NO_TOOLS", field="tools")
    return written


def functions_of(body: ChatRequest) -> dict[str, dict[str, Any]]:
    """The schemas of the functions that the model may call, by name."""
    return {tool.function.name: tool.function.parameters or {} for tool in offered(body)}


def offered(body: ChatRequest) -> list[Tool]:
    """The functions that the model may call; it is not told of others."""
    tools = [] if body.tool_choice == "none" else body.tools or []
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        tools = [tool for tool in tools if tool.function.name == name]
        if not tools:
            raise InvalidInput("no tool has that name", reason="BAD_FIELD", field="tool_choice.function.name")
    if isinstance(body.tool_choice, AllowedTools):
        names = {each.function.name for each in body.tool_choice.allowed_tools.tools}
        tools = [tool for tool in tools if tool.function.name in names]
        if names != {tool.function.name for tool in tools}:
            why = "one of these names is not a tool's"
            raise InvalidInput(why, reason="BAD_FIELD", field="tool_choice.allowed_tools.tools")
    return tools


def definition(function: Function) -> llm_pb2.ToolDefinition:
    """A function that the model may call. If it must call one, the answer's form holds it to the parameters, strict or
    not."""
    return llm_pb2.ToolDefinition(
        name=function.name,
        description=function.description or "",
        parameters="" if function.parameters is None else to_json(function.parameters).decode(),
        strict=bool(function.strict),
    )


def forced_form(body: ChatRequest) -> str:
    """The schema of an answer that must be calls; empty if it need not. Parts of a function's parameters that cannot be
    compiled are left out if none is strict."""
    if not body.must_call:
        return ""
    functions = [tool.function for tool in offered(body)]
    form = _form(body, functions, [each.parameters for each in functions])
    return to_json(form if any(each.strict for each in functions) else leniently(form)).decode()


def loose_form(body: ChatRequest) -> str:
    """The same if it cannot be compiled at all: functions that are not strict take any object as arguments; empty if
    all are strict."""
    functions = [tool.function for tool in offered(body)] if body.must_call else []
    if all(each.strict for each in functions):
        return ""
    return to_json(_form(body, functions, [each.parameters if each.strict else None for each in functions])).decode()


def _form(
    body: ChatRequest, functions: Sequence[Function], parameters: Sequence[dict[str, Any] | None]
) -> dict[str, Any]:
    """The form of calls to these functions, each with these parameters."""
    if isinstance(body.tool_choice, NamedTool):
        return of_arguments(parameters[0])
    names = [function.name for function in functions]
    call, definitions = one_call(list(zip(names, parameters, strict=True)), "parameters")
    most = {"maxItems": 1} if body.parallel_tool_calls is False else {}
    return {"$defs": definitions, "type": "array", "items": call, "minItems": 1, **most}


def places_of(body: ChatRequest) -> dict[str, str]:
    """The caller's names of functions' fields, if the model is not told of all."""
    places = {id(tool): place for place, tool in enumerate(body.tools or ())}
    return {
        f"tools[{number}].function.{field}": f"tools[{places[id(tool)]}].function.{field}"
        for number, tool in enumerate(offered(body))
        if places[id(tool)] != number
        for field in ("name", "parameters", "strict")
    }
