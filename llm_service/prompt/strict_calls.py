"""Holds the model's calls to the schema of their function: the grammar of what follows the mark of a call, or of a
whole answer. It is JSON even if the model was taught another form: in XML, text has no quotes that would tell it from
numbers, and there is no place for a schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from common.errors import InvalidInput
from common.json_schema.calls import of_arguments, one_call
from common.json_schema.whitespace import with_short_gaps
from llm_service.prompt.chat_template import ChatTemplate
from llm_service.prompt.output_marks import AROUND_CALL, ToolFormat
from llm_service.request import Structure, ToolDefinition, Trigger

_SPACE = "SPACE: /[ \\n]{0,4}/"
_KIMI = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
_KIMI_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_MISTRAL, _ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_GRANITE = "<|tool_call|>"


def strict_calls(
    tools: Sequence[ToolDefinition], template: ChatTemplate, tokens: Mapping[str, int], *, refuses: bool = True
) -> tuple[Structure, Trigger] | None:
    """The grammar of calls, if one of the functions is strict; calls of the others take any object as arguments.
    `tokens` are the special tokens by their text. Raises InvalidInput if calls do not follow such a mark, or have a
    form that no grammar here can hold to a schema; if it does not refuse these, calls are free."""
    place = next((number for number, tool in enumerate(tools) if tool.strict), None)
    if place is None:
        return None
    try:
        begin, grammar = _grammar(tools, template, tokens)
    except KeyError:
        if not refuses:
            return None
        raise InvalidInput(
            "this model's way of writing calls cannot be held to a schema",
            reason="NO_STRICT_TOOLS",
            field=f"chat.tools[{place}].strict",
        ) from None
    return Structure("grammar", grammar), Trigger(tokens[begin], recurs=True)


def calls_or_form(
    form: Structure, tools: Sequence[ToolDefinition], template: ChatTemplate, tokens: Mapping[str, int]
) -> Structure:
    """The grammar of an answer that has a form, or is calls. Raises InvalidInput if no grammar here describes the
    model's form of calls, or the answer's form is not a JSON Schema."""
    if form.kind != "json_schema":
        why = "calls can only replace an answer that has a JSON Schema"
        raise InvalidInput(why, reason="BAD_STRUCTURE", field=f"sampling.{form.kind}")
    try:
        schema = json.loads(form.text)
    except (ValueError, RecursionError):
        why = "the json_schema cannot be read"
        raise InvalidInput(why, reason="BAD_STRUCTURE", field="sampling.json_schema") from None
    try:
        begin, grammar = _grammar(tools, template, tokens)
        marks = [f"<[{tokens[mark]}]>" for mark in (begin, *(_KIMI_SECTION if begin == _KIMI[0] else ()))]
    except KeyError:
        why = "this model's way of writing calls cannot be combined with a form of the answer"
        raise InvalidInput(why, reason="NO_STRICT_TOOLS", field="chat.tools") from None
    mark, *section = marks
    calls = f"({mark} one_call GAP)+"
    if section:
        calls = f"{section[0]} GAP {calls} {section[1]}"
    answer = json.dumps(with_short_gaps(schema) if isinstance(schema, dict) else schema)
    return Structure(
        "grammar",
        f"start: GAP (answer | all_calls)\nGAP: /[ \\n]{{0,4}}/\nanswer: %json {answer}\nall_calls: {calls}\n"
        f"one_call: {grammar.removeprefix('start: ')}",
    )


def _grammar(tools: Sequence[ToolDefinition], template: ChatTemplate, tokens: Mapping[str, int]) -> tuple[str, str]:
    """The mark that precedes it, and the grammar. Raises KeyError if there is none, or a mark is not a token."""
    match template.tool_format:
        case ToolFormat.KIMI:
            begin, arguments, end = _KIMI
            head = f'"functions." name{{}} ":" TURN <[{tokens[arguments]}]>'
            return begin, _by_name(tools, head, f"<[{tokens[end]}]>") + "\nTURN: /[0-9]{1,4}/"
        case ToolFormat.MISTRAL if template.names_calls:
            id_ = f"(<[{tokens[_ID]}]> ID)? " if _ID in tokens else ""
            head = f"name{{}} {id_}<[{tokens[_ARGUMENTS]}]>"
            return _MISTRAL, _by_name(tools, head, "") + ("\nID: /[a-zA-Z0-9]{9}/" if id_ else "")
        case ToolFormat.MISTRAL | ToolFormat.GRANITE:
            call, definitions = _one_call(tools)
            several = {"type": "array", "items": call, "minItems": 1, "$defs": definitions}
            calls = json.dumps(with_short_gaps(several))
            begin = _MISTRAL if template.tool_format is ToolFormat.MISTRAL else _GRANITE
            return begin, f"start: SPACE calls\n{_SPACE}\ncalls: %json {calls}"
    begin, end = AROUND_CALL[template.tool_format]  # type: ignore[index] # KeyError where it is None as well
    call, definitions = _one_call(tools)
    schema = json.dumps(with_short_gaps({**call, "$defs": definitions}))
    return begin, f"start: SPACE call SPACE <[{tokens[end]}]>\n{_SPACE}\ncall: %json {schema}"


def _one_call(tools: Sequence[ToolDefinition]) -> tuple[dict[str, object], dict[str, object]]:
    return one_call([(tool.name, tool.parameters if tool.strict else None) for tool in tools], "arguments")


def _by_name(tools: Sequence[ToolDefinition], head: str, end: str) -> str:
    """One of the functions: the text before its arguments, the arguments, and the text behind them."""
    lines = ["start: " + " | ".join(f"call{number}" for number in range(len(tools)))]
    for number, tool in enumerate(tools):
        schema = of_arguments(tool.parameters if tool.strict else None)
        lines += [
            f"call{number}: {head.format(number)} arguments{number} {end}".rstrip(),
            f"name{number}: {json.dumps(tool.name, ensure_ascii=False)}",
            f"arguments{number}: %json {json.dumps(with_short_gaps(schema))}",
        ]
    return "\n".join(lines)
