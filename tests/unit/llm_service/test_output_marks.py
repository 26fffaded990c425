"""How a model writes calls and reasoning is told from the marks of its chat template."""

from __future__ import annotations

import pytest

from llm_service.prompt.chat_template import ChatTemplate
from llm_service.prompt.output_marks import THINK, ToolFormat

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
        ("<tool_call>{{ tools | tojson }}</tool_call><think>", ToolFormat.JSON, THINK),
        ("<tool_call><function={{ tools }}></function></tool_call>", ToolFormat.XML, None),
        (GLM, ToolFormat.GLM, THINK),
    ],
)
def test_a_template_shows_how_its_model_writes(
    template: str, form: ToolFormat | None, marks: tuple[str, str] | None
) -> None:
    read = ChatTemplate(template, {})
    assert (read.tool_format, read.reasoning_marks, read.never_thinks) == (form, marks or THINK, marks is None)
