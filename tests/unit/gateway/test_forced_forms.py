"""The form of an answer that must be calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from gateway.api.chat_request import ChatRequest
from gateway.tools import forced_form

BYTES = LLTokenizer("byte")
NAMED = {"type": "function", "function": {"name": "f"}}


def takes(form: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_json_schema(form))
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


def form(choice: Any, parameters: Any, *, strict: bool) -> str:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}
    message = {"role": "user", "content": "x"}
    return forced_form(ChatRequest.model_validate({"messages": [message], "tools": [tool], "tool_choice": choice}))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {},
        {"properties": {"a": {"type": "integer"}}},
        {"type": ["object", "null"]},
        {"anyOf": [{"type": "null"}, {"type": "object"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": ["object", "array"]}}},
    ],
)
def test_arguments_are_an_object_whatever_else_the_parameters_allow(parameters: Any, strict: bool) -> None:
    for choice, around in ((NAMED, "%s"), ("required", '[{"name": "f", "parameters": %s}]')):
        asked = form(choice, parameters, strict=strict)
        assert takes(asked, around % '{"a": 1}')
        assert not any(takes(asked, around % other) for other in ("null", "5", "[]", '"x"'))


def test_what_a_strict_function_asks_for_is_followed_or_refused() -> None:
    parameters = {"properties": {"a": {"uniqueItems": True}}}
    assert takes(form(NAMED, parameters, strict=False), '{"a": [1, 1]}')
    with pytest.raises(AssertionError, match="uniqueItems"):
        takes(form(NAMED, parameters, strict=True), "{}")


def test_own_settings_of_a_schema_stay() -> None:
    own = {"whitespace_flexible": False}
    assert json.loads(form(NAMED, {"x-guidance": own}, strict=False))["x-guidance"] == {"lenient": True, **own}
