"""Arguments of a call: typed by the function's schema, if a model's format does not distinguish text from other values,
and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

_REFERENCES: Final = 16
"""Steps from one `$ref` to the next that are followed."""
_ALTERNATIVES: Final = 64
"""Parts of a schema that are looked at for one value."""
_PYTHON_WORDS: Final = {"True": True, "False": False, "None": None}
_KINDS: Final = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


def parsed(text: str) -> Any:
    """The value of a JSON text; None if it is invalid, or cannot be in a response: NaN, or a lone surrogate."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return None if written(value) is None else value


def parsed_call(text: str) -> Any:
    """The same for calls; None also if an object has a duplicate key, since a streamed call has reported both."""
    try:
        json.loads(text, object_pairs_hook=_with_each_name_once)
    except (ValueError, RecursionError):
        return None
    return parsed(text)


def _with_each_name_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError
    return found


def written(value: Any) -> str | None:
    """A value as JSON; None if it cannot be in a response."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError):
        return None
    return text


class Schema:
    """A schema within a function's `parameters`, which are the root of references; anything but an object allows
    all."""

    def __init__(self, parameters: Any, part: Any = None) -> None:
        self._whole = parameters
        self._parts = self._alternatives(parameters if part is None else part)

    def _alternatives(self, part: Any) -> list[dict[str, Any]]:
        """The schema and its alternatives (`anyOf`, `allOf`, …); a schema may refer to itself."""
        found: list[dict[str, Any]] = []
        waiting = [part]
        while waiting and len(found) < _ALTERNATIVES:
            one = self._resolved(waiting.pop(0))
            if any(one is other for other in found):
                continue
            found.append(one)
            waiting += [each for name in ("anyOf", "oneOf", "allOf") for each in _listed(one.get(name))]
        return found

    def _resolved(self, part: Any) -> dict[str, Any]:
        for _ in range(_REFERENCES):
            if not isinstance(part, dict):
                break
            place = part.get("$ref")
            if not isinstance(place, str) or not place.startswith("#/"):
                return part
            part = self._whole
            for name in place[2:].split("/"):
                part = part.get(name) if isinstance(part, dict) else None
        return {}

    def kinds(self) -> set[str]:
        """The types that a value may have; empty if not stated."""
        found: set[str] = set()
        for part in self._parts:
            stated = part.get("type")
            found |= {kind for kind in [stated, *_listed(stated)] if isinstance(kind, str)}
            found |= {_kind(value) for value in _listed(part.get("enum"))}
            if "const" in part:
                found.add(_kind(part["const"]))
        return found

    def of(self, name: str) -> Schema:
        """That of a property."""
        for part in self._parts:
            properties = part.get("properties")
            if isinstance(properties, dict) and name in properties:
                return Schema(self._whole, properties[name])
        return Schema(self._whole, self._first("additionalProperties"))

    def of_items(self) -> Schema:
        """That of a list's elements."""
        return Schema(self._whole, self._first("items"))

    def _first(self, word: str) -> Any:
        return next((part[word] for part in self._parts if word in part), False)

    def value_of(self, text: str) -> Any:
        """The value of an unquoted text: a text, unless the schema allows other types and it parses as one of these."""
        kinds = self.kinds()
        if not kinds or kinds == {"string"}:
            return text
        value = _PYTHON_WORDS.get(text.strip(), parsed(text))
        is_read = value is not None or text.strip() in ("null", "None")
        if not is_read or ("string" in kinds and not _fits(value, kinds)):
            return text
        return value

    def as_said(self, value: Any) -> Any:
        """Converts a value that the model has written as text, or not as text, to the type in the schema."""
        if isinstance(value, str):
            return self.value_of(value)
        if self.kinds() == {"string"} and isinstance(value, (bool, int, float)):
            return written(value)
        return value


def arguments_of(parameters: Mapping[str, Any], pairs: Mapping[str, str]) -> dict[str, Any]:
    """Arguments that were written without quotes."""
    schema = Schema(parameters)
    return {name: schema.of(name).value_of(text) for name, text in pairs.items()}


def _fits(value: Any, kinds: set[str]) -> bool:
    kind = _kind(value)
    return kind != "string" and (kind in kinds or (kind == "integer" and "number" in kinds))


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "null")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
