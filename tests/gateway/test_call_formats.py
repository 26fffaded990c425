"""Calls in other families' forms, through all three services: marks that are special tokens reach whoever asked as
calls and reasoning. A random model is made to write them by a grammar."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import VOCABULARY
from tests.gateway.trio import Trio, said, trio
from twinlens import v1

PLAIN = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{% endfor %}"
NS = "]<]minimax[>["
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
FORMS: dict[str, tuple[v1.ToolFormat, str, list[str], str]] = {
    "an end mark": (
        v1.TOOL_FORMAT_GEMMA,
        "{{ tools }}{# <|tool_call>call:…<tool_call|> #}",
        ["<|tool_call>", "<tool_call|>", '<|"|>'],
        'I look.<|tool_call>call:weather{city:<|"|>Rome<|"|>,days:2}<tool_call|>',
    ),
    "the end of a value": (
        v1.TOOL_FORMAT_MISTRAL,
        "{{ tools }}{{ '[TOOL_CALLS]' if no else '' }}",
        ["[TOOL_CALLS]", "[ARGS]"],
        'I look.[TOOL_CALLS]weather[ARGS]{"city": "Rome", "days": 2}',
    ),
    "a section": (
        v1.TOOL_FORMAT_KIMI,
        "{{ tools }}{# <|tool_calls_section_begin|> #}",
        [
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
            "<|tool_call_argument_begin|>",
        ],
        (
            "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
            '{"city": "Rome", "days": 2}<|tool_call_end|><|tool_calls_section_end|>'
        ),
    ),
    "the whole answer behind reasoning": (
        v1.TOOL_FORMAT_LLAMA,
        "{{ tools }}{# <|header_start|> #}<mm:think>",
        ["<mm:think>", "</mm:think>"],
        '{"name": "weather", "parameters": {"city": "Rome", "days": 2}}',
    ),
}


def prepared(checkpoint: Path, folder: Path, template: str, marks: list[str]) -> dict[str, int]:
    """Makes a checkpoint with these marks as special tokens; their ids."""
    shutil.copytree(checkpoint, folder)
    ids = {mark: VOCABULARY + n for n, mark in enumerate(marks)}
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    like = {**tokenizer["added_tokens"][0], "special": True}
    tokenizer["added_tokens"] += [{**like, "id": token, "content": mark} for mark, token in ids.items()]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = VOCABULARY + len(ids)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(PLAIN + template)
    return ids


def grammar(text: str, ids: dict[str, int]) -> str:
    """One that has this text alone, with its marks as tokens."""
    pieces = re.split("(" + "|".join(map(re.escape, ids)) + ")", text)
    return "start: " + " ".join(f"<[{ids[each]}]>" if each in ids else json.dumps(each) for each in pieces if each)


def streamed(door: Trio, body: dict[str, Any]) -> tuple[str, str, str]:
    """The words, the thoughts and the arguments of a stream."""
    words, thoughts, arguments = "", "", ""
    for chunk in door.client.chat.completions.create(stream=True, **body):
        delta: Any = chunk.choices[0].delta
        words += delta.content or ""
        thoughts += getattr(delta, "reasoning_content", None) or ""
        arguments += "".join(call.function.arguments for call in delta.tool_calls or ())
    return words, thoughts, arguments


@pytest.mark.parametrize("name", FORMS)
def test_calls_come_through_all_services(checkpoint: Path, tmp_path: Path, name: str) -> None:
    form, template, marks, text = FORMS[name]
    ids = prepared(checkpoint, tmp_path / "model", template, marks)
    body: dict[str, Any] = {
        "messages": [said("Rome?")],
        "tools": [TOOL],
        "max_tokens": 200,
        "seed": 5,
        "temperature": 1,
        "logit_bias": {str(ids[mark]): 60 for mark in marks if mark == "</mm:think>"},
    }
    form_of_answer = {"guided_grammar": grammar(text, ids)}
    with trio(tmp_path / "model") as door:
        assert door.services.text.get_info().tool_format == form
        reply = json.loads(door.post("/v1/chat/completions", {**body, **form_of_answer}).body)
        message = reply["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
            "weather",
            {"city": "Rome", "days": 2},
        )
        assert (message["content"] or "") == ("I look." if "I look." in text else "")
        assert reply["choices"][0]["finish_reason"] == "tool_calls"
        thought = message.get("reasoning_content", "")
        thought_tokens = reply["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert (thought_tokens > 0) == ("<mm:think>" in marks)
        assert "mm:think" not in thought
        again = streamed(door, {**body, "model": door.model, "extra_body": form_of_answer})
        assert again == (message["content"] or "", thought, call["function"]["arguments"])
