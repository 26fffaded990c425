"""What holds a call that the model makes by itself to its function's parameters: the grammar of what stands between the
marks of a call, which begins behind the first one. It is JSON, also where the model was taught to write XML there: of
that, texts have no quotes that would tell them from numbers, and a schema no place."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from common.call_schema import one_call
from common.errors import InvalidInput
from llm_service.prompt.chat_template import ChatTemplate
from llm_service.prompt.output_marks import CALL, TAGGED
from llm_service.request import Structure, ToolDefinition, Trigger


def strict_calls(
    tools: Sequence[ToolDefinition], template: ChatTemplate, tokens: Mapping[str, int]
) -> tuple[Structure, Trigger] | None:
    """The grammar of calls, where one of the functions is strict: calls of the others have any object as arguments.
    `tokens` are those that stand for a word of their own. Raises InvalidInput where calls do not stand between two
    such marks."""
    place = next((number for number, tool in enumerate(tools) if tool.strict), None)
    if place is None:
        return None
    if template.tool_format not in TAGGED or not set(CALL) <= tokens.keys():
        raise InvalidInput(
            "calls as this model writes them cannot be held to a schema",
            reason="NO_STRICT_TOOLS",
            field=f"chat.tools[{place}].strict",
        )
    call, definitions = one_call([(tool.name, tool.parameters if tool.strict else None) for tool in tools], "arguments")
    schema = json.dumps({**call, "$defs": definitions})
    grammar = f"start: SPACE call SPACE <[{tokens[CALL[1]]}]>\nSPACE: /[ \\n]{{0,4}}/\ncall: %json {schema}"
    return Structure("grammar", grammar), Trigger(tokens[CALL[0]], recurs=True)
