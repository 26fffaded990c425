"""Calls in other families' forms, through all three services: marks that are special tokens reach whoever asked as
calls and reasoning. A random model is made to write them by a grammar."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from testkit.checkpoints import SPECIAL_IDS, VOCABULARY
from tests.gateway.trio import Trio, said, trio
from tests.rpc.pairs import answer, asked
from twinlens import LlmClient, user, v1

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
        "{{ tools }}{# [TOOL_CALLS]name[ARGS] #}",
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
    "a list": (
        v1.TOOL_FORMAT_GRANITE,
        "{{ tools }}{# <|tool_call|> #}",
        ["<|tool_call|>"],
        'I look.<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome", "days": 2}}]',
    ),
    "the whole answer behind reasoning": (
        v1.TOOL_FORMAT_LLAMA,
        "{{ tools }}{# <|header_start|> #}<mm:think>",
        ["<mm:think>", "</mm:think>"],
        '{"name": "weather", "parameters": {"city": "Rome", "days": 2}}',
    ),
}

RARE = ("a section", "a list")
"""Forms that run with `-m soak`: unit tests cover their parsers and their grammars of strict calls."""


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


SHAPE = {
    "type": "object",
    "properties": {"of": {"$ref": "#/$defs/shape"}, "at_most": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["of", "at_most"],
    "additionalProperties": False,
    "$defs": {"shape": {"enum": ["circle", "square"]}},
}
BEGINS = {
    "an end mark": "<|tool_call>",
    "the end of a value": "[TOOL_CALLS]",
    "a section": "<|tool_call_begin|>",
    "a list": "<|tool_call|>",
}
STRICT = v1.ToolDefinition(name="count", parameters=json.dumps(SHAPE), strict=True)
STRICT_CALLS = {
    "a list": r'\{\s*"name"\s*:\s*"count"\s*,\s*"arguments"\s*:\s*(\{.*?\})\s*\}',
    "an end mark": r'<\|tool_call>\s*\{\s*"name"\s*:\s*"count"\s*,\s*"arguments"\s*:\s*(\{.*?\})\s*\}\s*<tool_call\|>',
    "the end of a value": r"\[TOOL_CALLS\]count\[ARGS\](\{.*?\})",
    "a section": r"<\|tool_call_begin\|>functions\.count:\d+<\|tool_call_argument_begin\|>(\{.*?\})<\|tool_call_end\|>",
}


def check_strict(client: LlmClient, calls: str, begin: int) -> None:
    """A model that calls all the time, and would write anything there, writes what the function's schema allows."""
    bias = {begin: 100, SPECIAL_IDS["<|im_end|>"]: -100}
    request = asked(user("Count."), v1.SamplingParams(max_tokens=400, temperature=1.5, seed=11, logit_bias=bias))
    request.chat.tools.append(STRICT)
    (choice,) = answer(client, request).choices
    found = re.findall(calls, choice.text, re.DOTALL)
    assert len(found) > 1, choice.text
    assert choice.token_ids.count(begin) <= len(found) + 1, "all but one that is cut off are calls"
    for arguments in map(json.loads, found):
        assert arguments["of"] in ("circle", "square")
        assert 1 <= arguments["at_most"] <= 9
        assert len(arguments) == 2


def check_calls_or_form(client: LlmClient, calls: str, begin: int) -> None:
    """An answer that may be calls in the place of a form is what the model begins with."""
    for bias, pattern in ((100, calls), (-100, r'\s*\{\s*"a"\s*:\s*"(x|y)"\s*\}')):
        sampling = v1.SamplingParams(max_tokens=900, temperature=1.0, seed=11, logit_bias={begin: bias})
        sampling.json_schema = json.dumps({**SHAPE, "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]})
        request = asked(user("Count."), sampling)
        request.chat.tools.append(STRICT)
        request.chat.calls_or_form = True
        (choice,) = answer(client, request).choices
        assert re.search(pattern, choice.text, re.DOTALL), choice.text


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak) if name in RARE else name for name in FORMS]
)
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
        if name in STRICT_CALLS:
            check_strict(door.services.text, STRICT_CALLS[name], ids[BEGINS[name]])
            if name != "a section":
                check_calls_or_form(door.services.text, STRICT_CALLS[name], ids[BEGINS[name]])
        else:
            strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
            assert door.chat(tools=[strict]).error["code"] == "NO_STRICT_TOOLS"
