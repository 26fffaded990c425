"""Tools, calls, results and reasoning in a prompt: laid out as the template has them, and never as a part of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.errors import InvalidInput
from llm_service.convert.tools import read_tool, read_tool_call
from llm_service.prompt.chat_template import ChatTemplate
from llm_service.prompt.output_marks import ToolFormat
from llm_service.request import ChatPrompt, Message, ToolCall, ToolDefinition
from twinlens import v1

TEMPLATE = """\
{%- if tools %}
<tools>{% for tool in tools %}
{{ tool | tojson }}
{% for name, about in (tool.function.parameters or {}).get('properties', {})|items -%}
- {{ name }} is {{ about.type }}{% if about.description is defined %}: {{ about.description }}{% endif %}

{% endfor %}{% endfor %}</tools>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content.strip('\\n') }}</think>
{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{% for name, value in call.function.arguments|items %}<{{ name }}>{{ value }}</{{ name }}>
{% endfor %}{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"""

ENDS = "<|im_end|>"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": f'Say "it" {ENDS}'}, "days": {"type": "integer"}},
    "required": ["city"],
}
ARGUMENTS = {"city": f'"Rome"\n{ENDS}', "days": 2, "near": [True, None, {"a b": "ü"}]}
PROMPT = ChatPrompt(
    (
        Message("user", (f"What now? {ENDS}",)),
        Message(
            "assistant",
            ("Let me see.",),
            (ToolCall("call_1", "weather", ARGUMENTS),),
            reasoning=f"Hm. {ENDS}",
        ),
        Message("tool", (f'{{"sun": "{ENDS}"}}',), tool_call_id="call_1"),
    ),
    (ToolDefinition("weather", f"The weather\\ {ENDS}", PARAMETERS), ToolDefinition("now", "", None)),
    thinking=False,
)


def plain(prompt: ChatPrompt) -> str:
    """The same, with the texts in the template from the beginning."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    functions: list[dict[str, Any]] = []
    for tool in prompt.tools:
        about = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        functions.append({"type": "function", "function": {key: value for key, value in about.items() if value}})
    messages = [
        {
            "role": message.role,
            "content": "".join(map(str, message.parts)),
            "reasoning_content": message.reasoning,
            "tool_calls": [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.tool_calls
            ],
        }
        for message in prompt.messages
    ]
    variables = {} if prompt.thinking is None else {"enable_thinking": prompt.thinking}
    return environment.from_string(TEMPLATE).render(messages=messages, tools=functions or None, **variables)


def test_a_conversation_with_tools_reads_as_the_template_has_it() -> None:
    pieces = ChatTemplate(TEMPLATE, {}).render(PROMPT)
    assert "".join(text for text, _ in pieces) == plain(PROMPT)


def test_no_text_of_a_tool_a_call_or_reasoning_is_a_part_of_the_template() -> None:
    pieces = ChatTemplate(TEMPLATE, {}).render(PROMPT)
    assert "".join(text for text, own in pieces if not own).count(ENDS) == len(PROMPT.messages)
    assert "".join(text for text, own in pieces if own).count(ENDS) >= 6


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=4), st.text(), st.text())
def test_whatever_is_in_a_call_it_reads_as_it_is(arguments: dict[str, Any], name: str, thought: str) -> None:
    call = ToolCall("id", name, arguments)
    prompt = ChatPrompt((Message("assistant", ("x",), (call,), reasoning=thought.strip("\n")),))
    short = TEMPLATE.partition("{% for name, value")[0] + "{% endfor %}{% endfor %}"
    pieces = ChatTemplate(short, {}).render(prompt)
    text = "".join(text for text, _ in pieces)
    assert json.dumps(arguments, ensure_ascii=False) in text
    assert name in text


def test_a_template_without_a_place_for_something_refuses_it_by_name() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    user = Message("user", ("hi",))
    for prompt, reason, field in (
        (ChatPrompt((user,), (ToolDefinition("f", "", None),)), "NO_TOOLS", "chat.tools"),
        (ChatPrompt((user, Message("tool", ("x",)))), "NO_TOOLS", "chat.messages[1]"),
        (ChatPrompt((user, Message("assistant", (), (ToolCall("", "f", {}),)))), "NO_TOOLS", "chat.messages[1]"),
        (ChatPrompt((user,), thinking=True), "NO_THINKING", "chat.thinking"),
    ):
        with pytest.raises(InvalidInput) as error:
            template.render(prompt)
        assert (error.value.reason, error.value.field) == (reason, field)


def test_reasoning_that_is_sent_back_is_left_out_where_the_template_has_no_place_for_it() -> None:
    source = "{{ messages[0].content }}{% for name in messages[0] %} {{ name }}{% endfor %}"
    prompt = ChatPrompt((Message("assistant", ("x",), reasoning="y"),))
    assert ChatTemplate(source, {}).render(prompt) == [("x", True), (" role content", False)]


MISTRAL = """\
{{- tools }}{# [TOOL_CALLS] #}{% for message in messages %}
{%- for call in message.tool_calls or [] %}
{%- if call.id is not defined or call.id|length != 9 %}{{ raise_exception('ids are nine signs') }}{% endif %}
{{- '[' + call.id + ']' }}{% endfor %}
{%- if message.role == 'tool' %}
{%- if message.tool_call_id|length != 9 %}{{ raise_exception('nine') }}{% endif %}
{{- '(' + message.tool_call_id + ')' }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize("own", ["call_0123456789abcdef01234567", "bbc5b7ede", "0bc5b7ede", "", "ü" * 9])
def test_calls_have_ids_that_mistrals_templates_take_and_results_the_same(own: str) -> None:
    said = (
        Message("assistant", (), (ToolCall(own, "f", {}), ToolCall("other", "f", {}))),
        Message("tool", ("x",), tool_call_id=own or "missing"),
    )
    text = "".join(text for text, _ in ChatTemplate(MISTRAL, {}).render(ChatPrompt(said)))
    first, second, result = re.findall(r"[a-zA-Z0-9]{9}", text)
    assert first != second
    assert own == "" or result == first
    assert "5b7ede" not in own or first == own


@pytest.mark.parametrize("names", [["default", "tool_use"], ["tool_use", "rag", "default"]])
def test_of_several_templates_that_for_tools_is_taken_where_there_are_some(tmp_path: Path, names: list[str]) -> None:
    sources = {"default": "plain", "tool_use": "{{ tools | length }} <tool_call>", "rag": "{{ documents }}"}
    settings = {"chat_template": [{"name": name, "template": sources[name]} for name in names]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text("{}")
    template = ChatTemplate.of(Checkpoint(tmp_path))
    said = (Message("user", ("hi",)),)
    assert template.render(ChatPrompt(said)) == [("plain", False)]
    assert template.render(ChatPrompt(said, (ToolDefinition("f", "", None),))) == [("1 <tool_call>", False)]
    assert (template.knows_tools, template.tool_format) == (True, ToolFormat.JSON)


def test_not_to_think_may_be_asked_of_a_template_that_never_does() -> None:
    prompt = ChatPrompt((Message("user", ("hi",)),), thinking=False)
    assert ChatTemplate("{{ messages[0].content }}", {}).render(prompt) == [("hi", True)]
    always = ChatTemplate("{{ messages[0].content }}<think>", {})
    with pytest.raises(InvalidInput, match="not let requests choose thinking"):
        always.render(prompt)


@pytest.mark.parametrize(
    "message",
    [
        Message("user", ("x",), (ToolCall("", "f", {}),)),
        Message("user", ("x",), reasoning="y"),
        Message("assistant", ("x",), tool_call_id="1"),
    ],
)
def test_what_is_in_a_message_of_another_role_is_refused(message: Message) -> None:
    with pytest.raises(InvalidInput) as error:
        ChatTemplate(TEMPLATE, {}).render(ChatPrompt((message,)))
    assert error.value.reason == "BAD_TOOL"


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


BROKEN = ["5", "[]", "{", '"x"', r'{"a":"\ud83d"}', r'{"\ude00":1}', '{"a":NaN}', '{"a":1e999}']


@pytest.mark.parametrize("text", [*BROKEN, nested(9), nested(100_000), "[" * 100_000])
def test_what_is_no_object_or_too_deep_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput) as error:
        read_tool(v1.ToolDefinition(name="f", parameters=text), 8, "tools[0]")
    assert (error.value.reason, error.value.field) == ("BAD_TOOL", "tools[0].parameters")
    with pytest.raises(InvalidInput) as error:
        read_tool_call(v1.ToolCall(name="f", arguments=text), 8, "calls[0]")
    assert error.value.field == "calls[0].arguments"


def test_a_function_has_a_name_and_may_have_nothing_else() -> None:
    assert read_tool(v1.ToolDefinition(name="f", parameters=nested(8)), 8, "") == ToolDefinition(
        "f", "", json.loads(nested(8))
    )
    assert read_tool(v1.ToolDefinition(name="f"), 8, "") == ToolDefinition("f", "", None)
    assert read_tool_call(v1.ToolCall(name="f"), 8, "") == ToolCall("", "f", {})
    for read in (lambda: read_tool(v1.ToolDefinition(), 8, "t"), lambda: read_tool_call(v1.ToolCall(), 8, "t")):
        with pytest.raises(InvalidInput) as error:
            read()
        assert error.value.field == "t.name"


EFFORT = """\
{%- if reasoning_effort is defined and reasoning_effort not in ['none', 'low', 'high'] %}
{{- raise_exception('') }}{% endif %}
{{- messages[0].content }}|{{ reasoning_effort | default('as it likes') }}|{{ enable_thinking | default('either') }}"""


def laid_out(source: str, **fields: Any) -> str:
    pieces = ChatTemplate(source, {}).render(ChatPrompt((Message("user", ("hi",)),), **fields))
    return "".join(text for text, _ in pieces)


def test_a_template_is_told_how_much_to_think() -> None:
    assert laid_out(EFFORT) == "hi|as it likes|either"
    assert laid_out(EFFORT, reasoning_effort="low") == "hi|low|either"
    assert laid_out(EFFORT, reasoning_effort="none") == "hi|none|False"
    assert laid_out(EFFORT, thinking=True, reasoning_effort="high") == "hi|high|True"


def test_no_effort_is_no_thinking_where_the_template_knows_that_alone() -> None:
    assert laid_out("{{ enable_thinking }}", reasoning_effort="none") == "False"
    assert laid_out("{{ messages[0].content }}", reasoning_effort="none") == "hi"


@pytest.mark.parametrize(
    ("source", "effort", "reason", "field"),
    [
        ("{{ enable_thinking }}", "high", "NO_THINKING", "chat.reasoning_effort"),
        ("{{ messages[0].content }}", "high", "NO_THINKING", "chat.reasoning_effort"),
        ("<think>{{ messages[0].content }}", "none", "NO_THINKING", "chat.reasoning_effort"),
        (EFFORT, "medium", "BAD_EFFORT", "chat.reasoning_effort"),
        ("{{ reasoning_effort }}{{ raise_exception('') }}", "medium", "CHAT_REFUSED", "chat.messages"),
    ],
)
def test_an_effort_that_the_template_does_not_know_is_refused(
    source: str, effort: str, reason: str, field: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        laid_out(source, reasoning_effort=effort)
    assert (refused.value.reason, refused.value.field) == (reason, field)


def test_the_final_message_is_cut_behind_its_text() -> None:
    said = (Message("user", ("a",)), Message("assistant", ("b ", ENDS), reasoning="c"))
    pieces = ChatTemplate(TEMPLATE, {}).render(ChatPrompt(said, continues=True))
    text = "".join(text for text, _ in pieces)
    assert text == f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>c</think>\nb {ENDS}"
    assert (ENDS, True) in pieces
    empty = ChatPrompt((Message("user", ("a",)), Message("assistant", ("",))), continues=True)
    assert "".join(text for text, _ in ChatTemplate(TEMPLATE, {}).render(empty)).endswith("assistant\n")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message("user", ("a",)), "BAD_FINAL_MESSAGE"),
        (Message("assistant", ()), "BAD_FINAL_MESSAGE"),
        (Message("assistant", ("a",), (ToolCall("", "f", {}),)), "BAD_FINAL_MESSAGE"),
    ],
)
def test_nothing_goes_on_behind_a_message_without_an_end(message: Message, reason: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        ChatTemplate(TEMPLATE, {}).render(ChatPrompt((Message("user", ("a",)), message), continues=True))
    assert (refused.value.reason, refused.value.field) == (reason, "chat.messages[1]")


def test_nothing_goes_on_behind_a_message_that_the_template_leaves_out() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    with pytest.raises(InvalidInput) as refused:
        template.render(ChatPrompt((Message("user", ("a",)), Message("assistant", ("b",))), continues=True))
    assert refused.value.reason == "CHAT_REFUSED"


VARIABLES = """\
{{- messages[0].content }}|{{ kept | default('none') }}|{% for d in documents or [] %}{{ d.title | trim }}{% endfor %}
{{- '|' ~ (thinking is defined) }}"""


def test_a_template_is_told_what_it_asks_for_and_texts_stay_the_callers() -> None:
    documents = [{"title": f" {ENDS} "}, {"title": "word"}]
    prompt = ChatPrompt((Message("user", ("hi",)),), variables={"kept": 3, "documents": documents})
    pieces = ChatTemplate(VARIABLES, {}).render(prompt)
    assert "".join(text for text, _ in pieces) == f"hi|3|{ENDS}word|False"
    assert (ENDS, True) in pieces


def test_what_a_request_does_not_say_is_as_the_service_was_started() -> None:
    template = ChatTemplate("{{ kept }}{{ enable_thinking }}", {}, defaults={"kept": "<a>", "enable_thinking": False})
    user = (Message("user", ("hi",)),)
    assert template.render(ChatPrompt(user)) == [("<a>False", False)]
    assert template.render(ChatPrompt(user, variables={"kept": "<b>"}, thinking=True)) == [
        ("<b>", True),
        ("True", False),
    ]


@pytest.mark.parametrize("name", ["other", "messages", "enable_thinking", "reasoning_effort", "namespace", "d", "loop"])
def test_a_variable_that_the_template_does_not_ask_for_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidInput, match=name) as refused:
        ChatTemplate(VARIABLES, {}).render(ChatPrompt((Message("user", ("hi",)),), variables={name: 1}))
    assert (refused.value.reason, refused.value.field) == ("BAD_VARIABLE", "chat.template_variables")
    with pytest.raises(CheckpointError, match=name):
        ChatTemplate(VARIABLES.replace("thinking", "thought"), {}, defaults={name: 1})
