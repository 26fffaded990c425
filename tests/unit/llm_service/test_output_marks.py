"""How a model writes calls and reasoning is told from the marks of its chat template."""

from __future__ import annotations

import pytest

from llm_service.prompt.chat_template import ChatTemplate
from llm_service.prompt.output_marks import THINK, OutputMarks, ToolFormat
from llm_service.request import ChatPrompt, Message, ToolCall

GLM = """\
{%- if tools %}For each function call: <tool_call>{function-name}
<arg_key>{arg-key-1}</arg_key>
<arg_value>{arg-value-1}</arg_value>
</tool_call>{% endif %}
{%- for m in messages %}<|{{ m.role }}|>
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% endfor %}"""


@pytest.mark.parametrize(
    ("template", "form", "marks"),
    [
        ("{{ messages[0].content }}", None, None),
        ("<|start_header_id|>user{{ messages[0].content }}", None, None),
        ("<tool_call>{{ tools | tojson }}</tool_call><think>", ToolFormat.JSON, THINK),
        ("<tool_call><function={{ tools }}></function></tool_call>", ToolFormat.XML, None),
        (GLM, ToolFormat.GLM, THINK),
        ("<tool_calls><tool_call>{{ tools }}<tool_sep><arg_key>", None, None),
    ],
)
def test_a_template_shows_how_its_model_writes(
    template: str, form: ToolFormat | None, marks: tuple[str, str] | None
) -> None:
    read = ChatTemplate(template, {})
    assert (read.tool_format, read.reasoning_marks, read.never_thinks) == (form, marks or THINK, marks is None)


@pytest.mark.parametrize(
    ("template", "form", "marks"),
    [
        ("{{ '[TOOL_CALLS]' + tools }}{{ '[THINK]' }}", ToolFormat.MISTRAL, ("[THINK]", "[/THINK]")),
        ("<|tool_calls_section_begin|>{{ tools }}<think></think>", ToolFormat.KIMI, THINK),
        ("<|tool_call>call:<tool_call|>{{ tools }}<|channel>", ToolFormat.GEMMA, ("<|channel>thought", "<channel|>")),
        ("<|header_start|>assistant{{ tools | tojson }}", ToolFormat.LLAMA, None),
        ("List of tools: [{{ tools }}]", ToolFormat.LFM, None),
        ("<|tool_call_start|>{{ tools }}<|tool_call_end|><think>", ToolFormat.LFM, THINK),
        ("respond with <|tool_call|> followed by a list{{ tools }}<tool_call>", ToolFormat.GRANITE, None),
        (
            "<|tools_prefix|>{{ tools }}<|inner_prefix|>",
            ToolFormat.APERTUS,
            ("<|inner_prefix|>", "<|inner_suffix|>"),
        ),
        ("<｜tool▁calls▁begin｜>{{ tools }}<think>", ToolFormat.DEEPSEEK, THINK),
        ("<tool_calls>{{ tools }}</tool_calls><tool_call>", ToolFormat.HUNYUAN, None),
        ("formatted as functools[{{ tools }}", ToolFormat.PHI, None),
        ("<|action_start|><|plugin|>{{ tools }}<|action_end|>", ToolFormat.INTERNLM, None),
        (
            '{"name": function name, "parameters": dictionary of argument name and its value}{{ tools | tojson }}',
            ToolFormat.LLAMA,
            None,
        ),
        ("]<]minimax[>[<tool_call>{{ tools }}<mm:think>", ToolFormat.MINIMAX, ("<mm:think>", "</mm:think>")),
    ],
)
def test_other_families_have_marks_of_their_own(template: str, form: ToolFormat, marks: tuple[str, str] | None) -> None:
    test_a_template_shows_how_its_model_writes(template, form, marks)


def test_what_the_operator_names_goes_before_what_the_template_shows() -> None:
    shown = "<tool_call>{{ tools | tojson }}</tool_call>"
    named = ChatTemplate(shown, {}, marks=OutputMarks.named("granite", "mistral"))
    assert (named.tool_format, named.reasoning_marks, named.never_thinks) == (
        ToolFormat.GRANITE,
        ("[THINK]", "[/THINK]"),
        False,
    )
    left = ChatTemplate(shown, {}, marks=OutputMarks.named("auto", "auto"))
    assert (left.tool_format, left.reasoning_marks, left.never_thinks) == (ToolFormat.JSON, THINK, True)


def test_nothing_is_read_where_the_operator_says_none() -> None:
    shown = "<tool_call>{{ tools | tojson }}</tool_call>{{ '<think>' }}"
    unread = ChatTemplate(shown, {}, marks=OutputMarks.named("none", "none"))
    assert (unread.tool_format, unread.reads_reasoning, unread.never_thinks) == (ToolFormat.NONE, False, False)
    assert not unread.may_think(ChatPrompt(()))
    assert ChatTemplate("x", {}, marks=OutputMarks.named("auto", "none")).never_thinks


def rendered(template: str, *messages: Message, thinking: bool | None = None) -> str:
    return "".join(text for text, _ in ChatTemplate(template, {}).render(ChatPrompt(messages, thinking=thinking)))


def test_what_published_templates_use_of_jinja_is_known() -> None:
    loop = "{% for each in [1, 2, 3] %}{% if each == 2 %}{% break %}{% endif %}{{ each }}{% endfor %}"
    kept = "{% generation %}{{ messages[0].content }}{% endgeneration %}"
    assert rendered(loop + kept + "{{ strftime_now('%Y') | length }}", Message("user", ("Hi.",))) == "1Hi.4"


KIMI = """\
{%- for m in messages %}{{ m.content }}
{%- if m.role == 'tool' %}## Return of {{ m.tool_call_id }}{% endif %}
{%- if m.tool_calls %}<|tool_calls_section_begin|>
{%- for call in m.tool_calls %}<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>
{{- call['function']['arguments'] | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}
{%- endfor %}{% if tools %}{% endif %}{% if thinking is defined and thinking is false %}<think></think>{% endif %}"""


def test_kimis_calls_are_named_by_function_and_turn_whatever_their_ids_are() -> None:
    calls = (ToolCall("call_b", "now", {}), ToolCall("call_a", "find", {"a": "ü"}))
    text = rendered(
        KIMI,
        Message("assistant", (), calls),
        Message("tool", ("T.",), tool_call_id="call_a"),
        Message("assistant", (), (ToolCall("x", "now", {}),)),
        Message("tool", ("U.",), tool_call_id="x"),
        Message("tool", ("V.",), tool_call_id="unknown"),
        thinking=False,
    )
    assert text == (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
        '<|tool_call_begin|>functions.find:1<|tool_call_argument_begin|>{"a": "ü"}<|tool_call_end|>'
        "<|tool_calls_section_end|>T.## Return of functions.find:1"
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:2<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>U.## Return of functions.now:2V.## Return of unknown<think></think>"
    )


IN_A_BLOCK = """\
{%- for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for block in m.content %}
{%- if block['type'] == 'thinking' %}[THINK]{{ block['thinking'] }}[/THINK]{% else %}{{ block['text'] }}{% endif %}
{%- endfor %}{% endif %}{% endfor %}"""
IN_A_FIELD = """\
{%- for message in messages %}
{%- if message.thinking is defined %}[THINK]{{ message.thinking }}[/THINK]{% endif %}{{ message.content }}
{%- endfor %}"""


@pytest.mark.parametrize("template", [IN_A_BLOCK, IN_A_FIELD], ids=["block", "field"])
def test_reasoning_that_comes_back_stands_where_the_template_looks_for_it(template: str) -> None:
    thought = Message("assistant", ("So.",), reasoning="Hm.")
    assert rendered(template, Message("user", ("Hi.",)), thought) == "Hi.[THINK]Hm.[/THINK]So."
