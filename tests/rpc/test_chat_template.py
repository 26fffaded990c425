"""A chat template of the operator's own in place of the checkpoint's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import llm_server
from tests.rpc.pairs import LLM_FLAGS, Pair
from twinlens import LlmClient, user, v1

TEMPLATE = """\
{%- for m in messages -%}<|im_start|>{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor -%}
{% if tools %}<tool_call>{"name": "{% endif %}"""


def test_conversations_are_laid_out_as_it_says(qwen3: Pair, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text(TEMPLATE)
    with llm_server(qwen3.checkpoint, **LLM_FLAGS, chat_template=own) as llm, LlmClient(llm.address) as text:
        laid_out = text.tokenize(user("hello"))
        assert laid_out == text.tokenize("<|im_start|>user: hello", allow_special=True)
        assert laid_out != qwen3.text.tokenize(user("hello"))
        assert text.get_info().tool_format == v1.TOOL_FORMAT_JSON


@pytest.mark.parametrize(
    ("template", "why"), [("", "--chat-template cannot be read"), ("{% if %}", "the chat template is no Jinja: line 1")]
)
def test_a_file_that_is_none_ends_the_start_with_a_sentence(
    qwen3: Pair, tmp_path: Path, template: str, why: str
) -> None:
    own = tmp_path / "own.jinja"
    if template:
        own.write_text(template)
    with pytest.raises(RuntimeError, match=why), llm_server(qwen3.checkpoint, **LLM_FLAGS, chat_template=own):
        pass
