"""Calls that must be made: arguments are an object, and follow what can be followed of their function's schema."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.trio import Trio, said, trio
from tests.unit.llm_service.test_tools_in_prompts import TEMPLATE

NAMED = {"type": "function", "function": {"name": "f"}}
PLAIN = {"type": "object", "properties": {"to": {"enum": ["a"]}}, "required": ["to"], "additionalProperties": False}
NO_REGEX = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?!x).*$"}}}


@pytest.fixture(scope="module")
def door(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    folder = Path(shutil.copytree(checkpoint, tmp_path_factory.mktemp("own") / "tools"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    with trio(folder) as running:
        yield running


def tool(name: str, parameters: Any, *, strict: bool = False) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


def asked(door: Trio, tools: list[Any], choice: Any, **fields: Any) -> Any:
    return door.chat(messages=[said("Hi.")], tools=tools, tool_choice=choice, max_tokens=160, **fields)


def held(a: Any, **more: Any) -> dict[str, Any]:
    """Parameters of which one is so, and another one follows what it must."""
    return {
        "type": "object",
        "properties": {"to": {"enum": ["a"]}, "a": a},
        "required": ["to"],
        "additionalProperties": False,
        **more,
    }


@pytest.mark.parametrize(
    "parameters",
    [
        held({"type": "array", "items": {"type": "string"}, "uniqueItems": True}),
        held({"type": "string", "format": "uri-template"}),
        held({"not": {"type": "null"}}),
        held({"type": "object", "propertyNames": {"pattern": "^a"}}),
        held({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]}),
        {**PLAIN, "if": {"properties": {}}, "then": {}},
        {**PLAIN, "dependentRequired": {"a": ["b"]}},
        {**PLAIN, "type": ["object", "null"]},
        {"anyOf": [{"type": "null"}, PLAIN]},
    ],
    ids=lambda each: json.dumps(each)[:60],
)
def test_what_can_be_followed_of_a_schema_is(door: Trio, parameters: Any) -> None:
    tools = [tool("f", parameters)]
    (choice,) = json.loads(asked(door, tools, NAMED).body)["choices"]
    (made,) = choice["message"]["tool_calls"]
    assert re.match(r'\{\s*"to"\s*:\s*"a"', made["function"]["arguments"])
    reply = asked(door, [*tools, tool("g", PLAIN)], "required")
    assert reply.status == 200, reply.body


@pytest.mark.parametrize("parameters", [NO_REGEX, {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}])
def test_arguments_are_any_object_where_a_schema_cannot_be_followed_at_all(door: Trio, parameters: Any) -> None:
    for choice in ("required", NAMED):
        for tools in ([tool("f", parameters)], [tool("f", parameters), tool("g", PLAIN, strict=True)]):
            reply = asked(door, tools, choice)
            assert reply.status == 200, reply.body
    function = {"name": "f", "parameters": parameters}
    responses = {"input": "x", "tools": [{"type": "function", **function}], "tool_choice": "required"}
    assert door.post("/v1/responses", {**responses, "max_output_tokens": 20}).status == 200
    messages = {"messages": [said("x")], "tools": [{"name": "f", "input_schema": parameters}]}
    forced = {"tool_choice": {"type": "any"}, "max_tokens": 20}
    assert door.post("/v1/messages", {**messages, **forced}).status == 200


def test_a_strict_function_whose_schema_cannot_be_followed_is_named(door: Trio) -> None:
    tools = [tool("f", NO_REGEX), tool("g", PLAIN, strict=True), tool("h", NO_REGEX, strict=True)]
    named = {"type": "function", "function": {"name": "h"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    for choice in ("required", named, allowed):
        reply = asked(door, tools, choice)
        assert (reply.status, reply.error["code"]) == (400, "BAD_STRUCTURE")
        assert reply.error["param"] == "tools[2].function.parameters"
        assert "look-ahead" in reply.error["message"]
    flat = [{"type": "function", **each["function"]} for each in tools]
    for each in ("required", {"type": "function", "name": "h"}):
        error = door.post("/v1/responses", {"input": "x", "tools": flat, "tool_choice": each}).error
        assert error["param"] == "tools[2].parameters"
    theirs = [{"name": each["name"], "input_schema": each["parameters"], "strict": each["strict"]} for each in flat]
    asking = {"messages": [said("x")], "max_tokens": 5, "tools": theirs, "tool_choice": {"type": "tool", "name": "h"}}
    told = json.loads(door.post("/v1/messages", asking).body)["error"]["message"]
    assert told.startswith("tools[2].input_schema: ")
