"""A chat template of the operator's own in place of the checkpoint's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.launch import llm_server
from tests.rpc.pairs import LLM_FLAGS, Pair, answer, asked, refusal
from twinlens import LlmClient, user, v1

TEMPLATE = """\
{%- for m in messages -%}<|im_start|>{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor -%}
{% if tools %}<tool_call>{"name": "{% endif %}{{ mood }}"""


def test_conversations_are_laid_out_as_it_says(qwen3: Pair, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text(TEMPLATE)
    own_flags = {**LLM_FLAGS, "chat_template": own, "default_chat_template_kwargs": '{"mood": " calm"}'}
    with llm_server(qwen3.checkpoint, **own_flags) as llm, LlmClient(llm.address) as text:
        laid_out = text.tokenize(user("hello"))
        assert laid_out == text.tokenize("<|im_start|>user: hello calm", allow_special=True)
        for variables, wanted in (
            ('{"mood": " gay"}', "<|im_start|>user: hello gay"),
            ('{"other": 1}', "BAD_VARIABLE"),
        ):
            request = asked(user("hello"), v1.SamplingParams(max_tokens=1))
            request.return_prompt_token_ids, request.chat.template_variables = True, variables
            if wanted == "BAD_VARIABLE":
                assert refusal(text, request).reason == wanted
            else:
                ids = answer(text, request).started.prompt_token_ids
                assert ids == text.tokenize(wanted, allow_special=True)
        assert laid_out != qwen3.text.tokenize(user("hello"))
        assert text.get_info().tool_format == v1.TOOL_FORMAT_JSON


def test_how_calls_and_reasoning_are_written_is_the_operator_s_to_say(qwen3: Pair) -> None:
    named = {"tool_call_parser": "granite", "reasoning_parser": "mistral"}
    with llm_server(qwen3.checkpoint, **LLM_FLAGS, **named) as llm, LlmClient(llm.address) as text:
        assert text.get_info().tool_format == v1.TOOL_FORMAT_GRANITE
        started = answer(text, asked(user("hello"), v1.SamplingParams(max_tokens=1))).started
        assert (started.reasoning_begin, started.reasoning_end) == ("[THINK]", "[/THINK]")
    named = {"tool_call_parser": "none", "reasoning_parser": "none"}
    with llm_server(qwen3.checkpoint, **LLM_FLAGS, **named) as llm, LlmClient(llm.address) as text:
        assert text.get_info().tool_format == v1.TOOL_FORMAT_NONE
        started = answer(text, asked(user("hello"), v1.SamplingParams(max_tokens=1))).started
        assert (started.reasoning_unread, started.reasoning_begin, started.reasoning_end) == (True, "", "")
    with pytest.raises(RuntimeError, match="--tool-call-parser"):  # noqa: SIM117
        with llm_server(qwen3.checkpoint, **LLM_FLAGS, tool_call_parser="other"):
            pass


@pytest.mark.parametrize(
    ("template", "why"),
    [("", "--chat-template cannot be read"), ("{% if %}", "the chat template is not valid Jinja: line 1")],
)
def test_a_file_that_is_none_ends_the_start_with_a_sentence(
    qwen3: Pair, tmp_path: Path, template: str, why: str
) -> None:
    own = tmp_path / "own.jinja"
    if template:
        own.write_text(template)
    with pytest.raises(RuntimeError, match=why), llm_server(qwen3.checkpoint, **LLM_FLAGS, chat_template=own):
        pass


def test_a_texts_tokens_are_those_of_a_prompt_where_that_is_asked_for(qwen3: Pair, tmp_path: Path) -> None:
    """Of a tokenizer that puts a token before a text, as Llama's and Gemma's do."""
    folder = shutil.copytree(qwen3.checkpoint, tmp_path / "own")
    settings = json.loads((folder / "tokenizer.json").read_text())
    begin = next(each["id"] for each in settings["added_tokens"] if each["content"] == "<|endoftext|>")
    settings["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [begin], "tokens": ["<|endoftext|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    with llm_server(folder, **LLM_FLAGS) as llm, LlmClient(llm.address) as text:
        for words in ("Hello", "<|endoftext|>Hello", "<|im_end|>"):
            request = asked(v1.TextInput(prompt=words), v1.SamplingParams(max_tokens=1))
            request.return_prompt_token_ids = True
            wanted = answer(text, request).started.prompt_token_ids
            assert text.tokenize(words, allow_special=True, add_special_tokens=True) == wanted
            assert wanted == [begin, *text.tokenize(words.removeprefix("<|endoftext|>"), allow_special=True)]
        assert text.tokenize("<|im_end|>", add_special_tokens=True) == [begin, *text.tokenize("<|im_end|>")]
        assert text.tokenize("", add_special_tokens=True) == [begin]
