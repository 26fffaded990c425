"""Behind what the form of an answer begins: at once, or reasoning that its prompt or the model itself opens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.checkpoints.checkpoint import Checkpoint
from common.errors import InvalidInput
from llm_service.prompt.builder import PromptBuilder
from llm_service.prompt.output_marks import OutputMarks
from llm_service.request import ChatPrompt, Message, Prompt, Structure, TextPrompt, Trigger
from testkit.checkpoints import VOCABULARY

QWEN = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if enable_thinking is defined %}<think>
{% if not enable_thinking %}
</think>

{% endif %}{% endif %}"""
GLM = """\
{% for message in messages %}<|im_start|>{{ message.content }}{% endfor %}<|im_start|>
{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' }}"""
ASKED = ChatPrompt((Message("user", ("Count.",)),), thinks_before_form=True)
FORM = Structure("json_schema", "{}")
BEGIN, END = VOCABULARY, VOCABULARY + 1


@pytest.fixture
def built(checkpoint: Path, tmp_path: Path) -> Callable[..., PromptBuilder]:
    """A builder of prompts of a model with this template, which has a token for each of these marks."""

    def build(template: str, *marks: str, **settings: Any) -> PromptBuilder:
        folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        like = {**tokenizer["added_tokens"][0], "special": False}
        tokenizer["added_tokens"] += [{**like, "id": VOCABULARY + n, "content": mark} for n, mark in enumerate(marks)]
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["vocab_size"] = VOCABULARY + len(marks)
        (folder / "config.json").write_text(json.dumps(config))
        return PromptBuilder(Checkpoint(folder), chat_template=template, **settings)

    return build


def triggered(builder: PromptBuilder, prompt: Prompt, form: Structure = FORM) -> Trigger | None:
    return builder.form_trigger(prompt, builder.layout(builder.pieces(prompt, []), []).ids, form)


def test_a_model_may_open_its_reasoning_unless_its_prompt_has(built: Callable[..., PromptBuilder]) -> None:
    builder = built(QWEN, "<think>", "</think>")
    assert triggered(builder, ASKED) == Trigger(END, openings=((BEGIN,),))
    assert triggered(builder, replace(ASKED, thinking=True)) == Trigger(END), "its prompt has opened it"
    assert triggered(builder, replace(ASKED, thinking=True, thinks_before_form=False)) == Trigger(END)
    for prompt in (
        replace(ASKED, thinks_before_form=False),
        replace(ASKED, thinking=False),
        replace(ASKED, reasoning_effort="none"),
        replace(ASKED, messages=(*ASKED.messages, Message("assistant", ("So",))), continues=True),
        TextPrompt("Count."),
    ):
        assert triggered(builder, prompt) is None
    own = Structure("regex", "<think>[0-9]</think>[0-9]")
    assert triggered(builder, ASKED, own) is None
    assert triggered(builder, ASKED, replace(own, text="[0-9]+")) is not None


def test_the_operator_s_word_on_thinking_counts_where_a_request_has_none(built: Callable[..., PromptBuilder]) -> None:
    template = QWEN.replace("is defined", "is none")
    builder = built(template, "<think>", "</think>", template_variables={"enable_thinking": False})
    assert triggered(builder, ASKED) is None
    assert triggered(builder, replace(ASKED, thinking=True)) is not None


def test_what_closes_reasoning_in_a_prompt_leaves_none_to_open(built: Callable[..., PromptBuilder]) -> None:
    assert triggered(built(QWEN.replace("is defined", "is none or true"), "<think>", "</think>"), ASKED) is None


def test_a_model_may_open_its_reasoning_in_a_new_line_where_its_template_does(
    built: Callable[..., PromptBuilder],
) -> None:
    builder = built(GLM, "<think>", "</think>")
    (line_end,) = builder.encode("\n")
    assert triggered(builder, ASKED) == Trigger(END, openings=((BEGIN,), (line_end, BEGIN)))


def test_an_opening_may_be_a_token_and_a_text(built: Callable[..., PromptBuilder]) -> None:
    builder = built(QWEN, "<|channel>", "<channel|>", output_marks=OutputMarks.named("", "gemma4"))
    assert triggered(builder, ASKED) == Trigger(END, openings=((BEGIN, *builder.encode("thought")),))


def test_where_reasoning_is_not_read_a_form_begins_at_once_and_no_prompt_ends_in_it(
    built: Callable[..., PromptBuilder],
) -> None:
    builder = built(QWEN, "<think>", "</think>", output_marks=OutputMarks.named("auto", "none"))
    for thinking in (None, True, False):
        assert triggered(builder, replace(ASKED, thinking=thinking)) is None
    assert not builder.ends_in_thinking(builder.encode("x<think>\n", allow_special=True))
    with pytest.raises(InvalidInput, match="no token for the end of its reasoning"):
        builder.thinking_bound(5)


@pytest.mark.parametrize("marks", [(), ("<think>",), ("<other>", "</think>")])
def test_without_tokens_for_its_marks_a_form_begins_at_once(
    built: Callable[..., PromptBuilder], marks: tuple[str, ...]
) -> None:
    assert triggered(built(QWEN, *marks), ASKED) is None
