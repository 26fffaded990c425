"""Calls of strict functions, in each family's form: what the grammar takes, and what is refused."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher, LLTokenizer

from common.errors import InvalidInput
from llm_service.prompt.chat_template import ChatTemplate
from llm_service.prompt.strict_calls import calls_or_form, strict_calls
from llm_service.request import Structure, ToolDefinition

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
        ("<|tool_call|>", "<|tool_call|>", '[{{"name": "{quoted}", "arguments": {arguments}}}]'),
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
        ("<|tools_prefix|>", "<|tools_prefix|> <|tools_suffix|>"),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜> <｜tool▁call▁end｜>"),
        ("functools[", ""),
        ("<tool_call>", "<tool_call>"),
        ("", "<tool_call> </tool_call>"),
    ],
    ids=[
        "Mistral without [ARGS]",
        "Kimi without a mark",
        "Llama",
        "MiniMax",
        "Apertus",
        "DeepSeek",
        "Phi",
        "JSON without its end",
        "none",
    ],
)
def test_what_no_grammar_holds_is_refused(template: str, marks: str) -> None:
    with pytest.raises(InvalidInput) as error:
        takes(template, marks, "")
    assert (error.value.reason, error.value.field) == ("NO_STRICT_TOOLS", "chat.tools[1].strict")
    tokens = {mark: number for number, mark in enumerate(marks.split(), 1)}
    assert strict_calls(TOOLS, ChatTemplate(template, {}), tokens, refuses=False) is None


ANSWER = Structure("json_schema", '{"properties": {"a": {"type": "integer"}}, "required": ["a"]}')


@pytest.mark.parametrize(
    ("template", "marks", "call"),
    [
        (MISTRAL, "[TOOL_CALLS] [ARGS]", "\1note\2{}"),
        ("[TOOL_CALLS]", "[TOOL_CALLS]", '\1[{"name": "note", "arguments": {}}]'),
        (
            KIMI,
            f"{KIMI_MARKS} <|tool_calls_section_begin|> <|tool_calls_section_end|>",
            "\4\1functions.note:0\2{}\3\5",
        ),
        ("<function=><tool_call>", "<tool_call> </tool_call>", '\n\1\n{"name": "note", "arguments": {}}\n\2'),
    ],
    ids=["Mistral", "a list", "Kimi", "XML"],
)
def test_an_answer_has_its_form_or_is_calls(template: str, marks: str, call: str) -> None:
    tokens = {mark: number for number, mark in enumerate(marks.split(), 1)}
    structure = calls_or_form(ANSWER, TOOLS, ChatTemplate(template, {}), tokens)

    def answers(text: str) -> bool:
        matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(structure.text))
        assert not matcher.is_error(), matcher.get_error()
        return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()

    assert answers('{"a": 5}')
    assert answers(call)
    assert not answers('{"a": "5"}')
    assert not answers("Hm. " + call)
    assert not answers(call.replace("note", "other"))


@pytest.mark.parametrize(
    ("form", "template", "reason", "field"),
    [
        (ANSWER, "<|header_start|>", "NO_STRICT_TOOLS", "chat.tools"),
        (ANSWER, "<tool_call>", "NO_STRICT_TOOLS", "chat.tools"),
        (Structure("regex", "a"), "<tool_call>", "BAD_STRUCTURE", "sampling.regex"),
        (Structure("json_schema", "{"), "<tool_call>", "BAD_STRUCTURE", "sampling.json_schema"),
    ],
)
def test_calls_that_have_no_grammar_do_not_stand_in_an_answer_s_place(
    form: Structure, template: str, reason: str, field: str
) -> None:
    with pytest.raises(InvalidInput) as error:
        calls_or_form(form, TOOLS, ChatTemplate(template, {}), {})
    assert (error.value.reason, error.value.field) == (reason, field)
