"""Calls of strict functions, in each family's form: what the grammar takes, and what is refused."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher, LLTokenizer

from common.errors import InvalidInput
from llm_service.prompt.chat_template import ChatTemplate
from llm_service.prompt.strict_calls import strict_calls
from llm_service.request import ToolDefinition

SHAPE = {
    "type": "object",
    "properties": {"of": {"$ref": "#/$defs/shape"}},
    "required": ["of"],
    "additionalProperties": False,
    "$defs": {"shape": {"enum": ["circle"]}},
}
TOOLS = (ToolDefinition("note", "", None), ToolDefinition('co"unt', "", SHAPE, strict=True))
GOOD, BAD, ANY = '{"of": "circle"}', '{"of": "else"}', '{"x": [1]}'
BYTES = LLTokenizer("byte")


def takes(template: str, marks: str, text: str) -> bool:
    """Whether a call may go on so behind its mark, and ends there. Each mark is a token that stands for a control sign:
    the first for 1, and so on; `text` has these signs."""
    tokens = {mark: number for number, mark in enumerate(marks.split(), 1)}
    found = strict_calls(TOOLS, ChatTemplate(template, {}), tokens)
    assert found is not None
    structure, trigger = found
    assert trigger.recurs
    assert trigger.token == 1
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(structure.text))
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_stopped()


MISTRAL = "[TOOL_CALLS]name[ARGS]"
KIMI = "<|tool_calls_section_begin|>"
KIMI_MARKS = "<|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>"


@pytest.mark.parametrize(
    ("template", "marks", "form"),
    [
        (MISTRAL, "[TOOL_CALLS] [ARGS]", "{name}\2{arguments}"),
        (MISTRAL, "[TOOL_CALLS] [ARGS] [CALL_ID]", "{name}\3abcdefgh1\2{arguments}"),
        (MISTRAL, "[TOOL_CALLS] [ARGS] [CALL_ID]", "{name}\2{arguments}"),
        ("[TOOL_CALLS]", "[TOOL_CALLS]", ' [{{"name": "{quoted}", "arguments": {arguments}}}]'),
        (KIMI, KIMI_MARKS, "functions.{name}:12\2{arguments}\3"),
        ("<|tool_call>", "<|tool_call> <tool_call|>", '{{"name": "{quoted}", "arguments": {arguments}}}\2'),
        (
            "<|tool_call_start|>",
            "<|tool_call_start|> <|tool_call_end|>",
            '{{"name":"{quoted}","arguments":{arguments}}}\2',
        ),
        ("<arg_key><tool_call>", "<tool_call> </tool_call>", '\n{{"name": "{quoted}", "arguments": {arguments}}}\n\2'),
    ],
)
def test_a_call_is_held_to_the_schema_of_its_function(template: str, marks: str, form: str) -> None:
    def call(name: str, arguments: str) -> bool:
        quoted = name.replace('"', '\\"')
        return takes(template, marks, form.format(name=name, quoted=quoted, arguments=arguments))

    assert call('co"unt', GOOD)
    assert not call('co"unt', BAD)
    assert call("note", ANY)
    assert not call("other", ANY)


@pytest.mark.parametrize(
    ("template", "marks"),
    [
        (MISTRAL, "[TOOL_CALLS]"),
        (KIMI, "<|tool_call_begin|> <|tool_call_end|>"),
        ("<|header_start|>", ""),
        ("]<]minimax[>[<tool_call>", "<tool_call> </tool_call>"),
        ("<tool_call>", "<tool_call>"),
        ("", "<tool_call> </tool_call>"),
    ],
    ids=["Mistral without [ARGS]", "Kimi without a mark", "Llama", "MiniMax", "JSON without its end", "none"],
)
def test_what_no_grammar_holds_is_refused(template: str, marks: str) -> None:
    with pytest.raises(InvalidInput) as error:
        takes(template, marks, "")
    assert (error.value.reason, error.value.field) == ("NO_STRICT_TOOLS", "chat.tools[1].strict")
