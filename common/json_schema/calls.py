"""JSON schemas of calls to one of several functions, to which the LLM service and the gateway hold answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Function = tuple[str, dict[str, Any] | None]
"""A function's name, and the JSON schema of its parameters; None: any object."""


def one_call(functions: Sequence[Function], arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of `{"name": …, arguments: …}` for one of the functions, and the definitions that belong into the root
    of the schema that it becomes a part of, as `$defs`: what parameters refer to by `#` is looked for from there.

    >>> call, definitions = one_call([("f", {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}})], "arguments")
    >>> call["anyOf"][0]["properties"]
    {'name': {'enum': ['f']}, 'arguments': {'$ref': '#/$defs/f0'}}
    >>> definitions
    {'f0': {'$ref': '#/$defs/f0/$defs/a', '$defs': {'a': {'type': 'object'}}, 'type': 'object'}}
    """
    calls, definitions = [], {}
    for number, (name, parameters) in enumerate(functions):
        place = f"f{number}"
        definitions[place] = _moved(of_arguments(parameters), f"#/$defs/{place}")
        properties = {"name": {"enum": [name]}, arguments: {"$ref": f"#/$defs/{place}"}}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls}, definitions


def of_arguments(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """The schema of a call's arguments, which are an object also where the parameters allow something else as well.

    >>> of_arguments(None), of_arguments({"type": ["object", "null"], "required": ["a"]})
    ({'type': 'object'}, {'type': 'object', 'required': ['a']})
    """
    return {**(parameters or {}), "type": "object"}


def _moved(schema: Any, root: str) -> Any:
    """A schema, or a part of one, adapted to its place at `root` of another."""
    match schema:
        case dict():
            return {
                name: root + value[1:]
                if name == "$ref" and isinstance(value, str) and value.startswith("#")
                else _moved(value, root)
                for name, value in schema.items()
            }
        case list():
            return [_moved(each, root) for each in schema]
        case _:
            return schema
