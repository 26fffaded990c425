"""What holds a call that the model makes by itself to its function's parameters: the grammar of what stands behind the
mark of a call, or of a whole answer. It is JSON, also where the model was taught to write another form there: in XML
texts have no quotes that would tell them from numbers, and a schema no place."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from common.call_schema import of_arguments, one_call
from common.errors import InvalidInput
from common.json_gaps import with_short_gaps
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
    """The grammar of calls, where one of the functions is strict: calls of the others have any object as arguments.
    `tokens` are those that stand for a word of their own. Raises InvalidInput where calls do not stand behind such a
    mark, or have a form that no grammar here holds to a schema; where it does not refuse that, calls are free."""
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
    """The grammar of an answer that has a form, or is calls. Raises InvalidInput where calls have a form that no
    grammar here describes, or the answer's form is no JSON Schema."""
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
    """The mark that it stands behind, and the grammar. Raises KeyError where there is none, or a mark is no token."""
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
    """One of the functions: what stands before its arguments, these, and what stands behind them."""
    lines = ["start: " + " | ".join(f"call{number}" for number in range(len(tools)))]
    for number, tool in enumerate(tools):
        schema = of_arguments(tool.parameters if tool.strict else None)
        lines += [
            f"call{number}: {head.format(number)} arguments{number} {end}".rstrip(),
            f"name{number}: {json.dumps(tool.name, ensure_ascii=False)}",
            f"arguments{number}: %json {json.dumps(with_short_gaps(schema))}",
        ]
    return "\n".join(lines)
