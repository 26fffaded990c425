"""Conversations are laid out as by transformers, whatever a template does to what users write; the templates are like
those of known families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from common.checkpoints.checkpoint import Checkpoint
from llm_service.prompt.builder import PromptBuilder
from llm_service.prompt.chat_template import ChatTemplate
from llm_service.request import ChatPrompt, Message

GEMMA = """\
{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}
{%- set opening = messages[0]['content'] + '\\n\\n' -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set opening = '' -%}{%- set rest = messages -%}{%- endif -%}
{%- for message in rest -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{ '<start_of_turn>' + role + '\\n' + (opening if loop.first else '') }}
{%- if message['content'] is string -%}{{ message['content'] | trim }}
{%- else -%}{%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}{%- endif -%}
{{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""
LLAMA = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- set head = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}
    {{- head + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
MISTRAL = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set loop_messages = messages[1:] %}
{%- else %}{% set loop_messages = messages %}{% endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message.role == 'user' %}
        {%- if loop.last and system is defined %}
            {{- '[INST] ' + system + '\\n\\n' + message.content + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message.content + '[/INST]' }}
        {%- endif %}
    {%- else %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- endif %}
{%- endfor %}"""
QWEN3 = """\
{%- set ns = namespace(multi_step=true, last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == 'user' and message.content is string and
        not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role != 'assistant' %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- else %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or reasoning_content) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') }}
            {{- '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
DEMO = Path(__file__).parents[2] / "models/demo"
TEMPLATES = {
    "gemma": GEMMA,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen3": QWEN3,
    "demo": (DEMO / "chat_template.jinja").read_text(),
}
TOKENS: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
TEXTS = st.lists(
    st.sampled_from(
        [
            *(" ", "\n", "\n\n", "\t", "hello", "Grüße", "<think>", "</think>", "<tool_response>", "</tool_response>"),
            *("\ue000", "\ue00000:1\ue001", "{{ x }}", "'", '"'),
        ]
    )
).map("".join)


def by_hf(template: str, said: list[tuple[str, str]], **options: Any) -> str:
    messages = [{"role": role, "content": text} for role, text in said]
    rendered, _ = render_jinja_template([messages], chat_template=template, **options, **TOKENS)
    return str(rendered[0])


@pytest.mark.parametrize("name", TEMPLATES)
@given(system=st.none() | TEXTS, turns=st.lists(st.tuples(TEXTS, TEXTS), max_size=3), last=TEXTS)
def test_a_conversation_reads_as_transformers_has_it(
    name: str, system: str | None, turns: list[tuple[str, str]], last: str
) -> None:
    said = [] if system is None else [("system", system)]
    said += [each for user, answer in turns for each in (("user", user), ("assistant", answer))] + [("user", last)]
    wanted = by_hf(TEMPLATES[name], said, add_generation_prompt=True)
    prompt = ChatPrompt(tuple(Message(role, (text,)) for role, text in said))
    made = ChatTemplate(TEMPLATES[name], TOKENS).render(prompt)
    assert "".join(text for text, _ in made) == wanted


@pytest.mark.parametrize("name", TEMPLATES)
@given(before=TEXTS, end=st.sampled_from(["so", "so ", " so\n"]))
def test_an_answer_that_goes_on_begins_where_transformers_does(name: str, before: str, end: str) -> None:
    said = [("user", before), ("assistant", end)]
    wanted = by_hf(TEMPLATES[name], said, continue_final_message=True)
    prompt = ChatPrompt(tuple(Message(role, (text,)) for role, text in said), continues=True)
    made = ChatTemplate(TEMPLATES[name], TOKENS).render(prompt)
    assert "".join(text for text, _ in made) == wanted


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_has_transformers_tokens(name: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(DEMO / "tokenizer.json"))
    template = TEMPLATES[name].replace("bos_token", "''").replace("eos_token", "'<|im_end|>'")
    said = [("user", "\n What is it? \n"), ("assistant", "<think>\nHm.\n</think>\n\n A dog.\n"), ("user", " Why?\n\n")]
    wanted = tokenizer.apply_chat_template(
        [{"role": role, "content": text} for role, text in said],
        chat_template=template,
        add_generation_prompt=True,
        return_dict=False,
    )
    builder = PromptBuilder(Checkpoint(DEMO), chat_template=template)
    pieces = builder.pieces(ChatPrompt(tuple(Message(role, (text,)) for role, text in said)), [])
    assert builder.layout(pieces, []).ids == wanted
