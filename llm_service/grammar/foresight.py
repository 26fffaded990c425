"""Estimates, before a structure is compiled, whether it must exceed the limits.

Structures that exceed them unforeseen are stopped by the limits on time and memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Any, NamedTuple
from urllib.parse import unquote

from llm_service.grammar.messages import StructureLimits
from llm_service.request import Structure

_ENDLESS = 1 << 62
"""Sums and products go no further, so that none grows into thousands of digits."""

_REGEX = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+\]?|(?P<open>\()|(?P<close>\))|\{(?P<minimum>\d+)(?:,\d*)?\}|(?P<plain>[^\\\[({)]+)|.",
    re.DOTALL,
)
"""Pieces of a regex: groups and counts. A run of plain characters is one piece; a count applies to the last of them."""

_GRAMMAR = re.compile(
    r'"(?:\\.|[^"\\\n])*+"?|(?://|\#)[^\n]*|/(?P<regex>(?:\\.|[^/\\\n])++)/?|%json\s*(?=(?P<json>\{))'
    r"|(?P<open>[(\[])|(?P<close>[)\]])|(?:\{|~)\s*(?P<minimum>\d+)|\w+|.",
    re.DOTALL,
)
"""Pieces of a Lark grammar: a name and a quoted text are one piece each."""

_MAPS = ("properties", "patternProperties", "dependentSchemas")
_SINGLE = ("additionalItems", "additionalProperties", "contains", "propertyNames", "if", "then", "else", "not")


class Demand(NamedTuple):
    """The least that a structure takes: `multiple` is the sum of its `multipleOf`s, `repeats` its length with required
    repetitions written out, `depth` the nesting of its groups.

    Because of these a short text can cost seconds and hundreds of megabytes, measured with llguidance 1.8 on one core.
    A `multipleOf` has about one state for each remainder (0.6 s and 43 MB at 99 991, 8 s and 370 MB at 999 983).
    Required repetitions are followed to their end at once (0.6 s and 90 MB at `a{1000000}`). Nested groups are read by
    a recursive function. Upper bounds cost nothing in advance (`[a-z]{0,1000000000}`, `maxLength`) and are ignored.
    """

    multiple: int = 0
    repeats: int = 0
    depth: int = 0

    def __add__(self, other: Demand) -> Demand:  # type: ignore[override]
        return Demand(
            min(self.multiple + other.multiple, _ENDLESS),
            min(self.repeats + other.repeats, _ENDLESS),
            max(self.depth, other.depth),
        )

    def times(self, count: int) -> Demand:
        """The demand of so many in a row."""
        return Demand(self.multiple, min(self.repeats * max(1, count), _ENDLESS), self.depth)

    def joined(self, other: Demand) -> Demand:
        """The demand of both for one value: it is a multiple of both, with a state for each pair of remainders."""
        multiple = max(1, self.multiple) * max(1, other.multiple) if self.multiple or other.multiple else 0
        return Demand(min(multiple, _ENDLESS), (self + other).repeats, max(self.depth, other.depth))


_NOTHING = Demand()


def refusal(structure: Structure, limits: StructureLimits) -> str:
    """Why a structure must exceed the limits, as a sentence for the caller; empty if nothing is foreseen."""
    demand, kind = demanded(structure), structure.kind
    if demand.multiple > limits.multiple:
        return f"the values of multipleOf in the {kind} come to more than {limits.multiple}"
    if demand.repeats > max(limits.repeats, len(structure.text)):
        return f"the {kind} is longer than {limits.repeats} once its repetitions are written out"
    if demand.depth > limits.depth:
        return f"the {kind} has more than {limits.depth} groups within each other"
    return ""


def demanded(structure: Structure) -> Demand:
    """The least that a structure takes. What cannot be read counts nothing: compiling it will say why."""
    match structure.kind:
        case "regex":
            return _written_out(_REGEX, structure.text)
        case "grammar":
            return _written_out(_GRAMMAR, structure.text)
        case "json_schema":
            return _of_schema(structure.text)
        case "choice" | "structural_tag":  # structural tags arrive as grammars
            return _NOTHING


def _written_out(pieces: re.Pattern[str], text: str) -> Demand:
    """A regex or grammar with its repetitions written out: each takes what it repeats as often as it must come. Every
    piece is looked at once.

    >>> _written_out(_REGEX, "a(bc{3}){2,}d?").repeats  # a bccc bccc d?
    11
    """
    done = last = 0  # of the group at hand: the length of all but its last piece, and of that
    outer: list[tuple[int, int]] = []
    deepest = end = 0
    inside = _NOTHING
    for found in pieces.finditer(text):
        if found.start() < end:  # in a schema that was read as a whole
            continue
        match found.lastgroup:
            case "open":
                outer.append((done, last))
                deepest = max(deepest, len(outer))
                done = last = 0
            case "close" if outer:
                group = done + last
                done, last = outer.pop()
                done, last = done + last, group
            case "minimum":
                last = min(last * max(1, _count(found["minimum"])), _ENDLESS)
            case "plain":
                done, last = done + last + len(found[0]) - 1, 1
            case "regex" | "json" as kind:
                within, end = _regex(found) if kind == "regex" else _embedded(text, found.end())
                inside += within
                done, last = done + last, within.repeats
            case _:
                done, last = done + last, 1
    length = done + last + sum(map(sum, outer))  # groups that are never closed: compiling it says so
    return Demand(inside.multiple, min(length, _ENDLESS), max(deepest, inside.depth))


def _regex(found: re.Match[str]) -> tuple[Demand, int]:
    """The demand of a regex inside a grammar, and where it ends."""
    return _written_out(_REGEX, found["regex"]), found.end()


def _count(digits: str) -> int:
    return int(digits) if len(digits) < 18 else _ENDLESS


def _embedded(text: str, start: int) -> tuple[Demand, int]:
    """The demand of a schema inside a grammar, and where it ends."""
    try:
        schema, end = json.JSONDecoder(parse_float=Decimal).raw_decode(text, start)
        return _Schema(schema).demand(schema), end
    except (ValueError, ArithmeticError, RecursionError):
        return _NOTHING, len(text)  # unreadable; skip the rest, since each further try would read all of it


def _of_schema(text: str) -> Demand:
    try:
        schema = json.loads(text, parse_float=Decimal)
        return _Schema(schema).demand(schema)
    except (ValueError, ArithmeticError, RecursionError):
        return _NOTHING


class _Schema:
    """A JSON schema; each target of a `$ref` is visited once."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[str, Demand] = {}

    def demand(self, node: Any) -> Demand:
        """The demand of a schema inside it."""
        if not isinstance(node, dict):
            return _NOTHING
        demand = self._own(node) + self._inside(node)
        for each in _each(node.get("allOf")):
            demand = demand.joined(self.demand(each))
        for name in ("anyOf", "oneOf"):
            demand = demand.joined(_sum(map(self.demand, _each(node.get(name)))))
        return demand.joined(self._referred(node.get("$ref")))

    def _own(self, node: dict[str, Any]) -> Demand:
        """The demand of a node's own value."""
        pattern = node.get("pattern")
        text = _written_out(_REGEX, pattern) if isinstance(pattern, str) else _NOTHING
        minimum = max(_number(node.get("minLength")), _number(node.get("minProperties")))
        return Demand(_coefficient(node.get("multipleOf")), text.repeats + minimum, text.depth)

    def _inside(self, node: dict[str, Any]) -> Demand:
        """The demand of the values inside a node's value."""
        count = _number(node.get("minItems"))
        items = node.get("items")
        found = self.demand(items).times(count) + _sum(map(self.demand, _each(items))) + Demand(0, count)
        found += _sum(map(self.demand, _each(node.get("prefixItems"))))
        for name in _MAPS:
            if isinstance(inside := node.get(name), dict):
                found += _sum(map(self.demand, inside.values()))
        return found + _sum(self.demand(node.get(name)) for name in _SINGLE)

    def _referred(self, pointer: object) -> Demand:
        if not isinstance(pointer, str) or not pointer.startswith("#"):
            return _NOTHING
        if pointer not in self._known:
            self._known[pointer] = _NOTHING  # a reference to itself adds nothing
            self._known[pointer] = self.demand(self._at(pointer))
        return self._known[pointer]

    def _at(self, pointer: str) -> Any:
        """The node that a pointer such as `#/$defs/a` names; None if there is none."""
        node = self._root
        for step in pointer.split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and name.isdecimal() and len(name) < 6:
                node = node[int(name)] if int(name) < len(node) else None
            else:
                node = node.get(name) if isinstance(node, dict) else None
        return node


def _each(given: object) -> list[Any]:
    return given if isinstance(given, list) else []


def _sum(demands: Iterable[Demand]) -> Demand:
    return sum(demands, _NOTHING)


def _number(given: object) -> int:
    return min(int(given), _ENDLESS) if isinstance(given, int | Decimal) and given > 0 else 0


def _coefficient(given: object) -> int:
    """What the remainders of a `multipleOf` are counted by: its digits, without the point and zeros at the end; 0 for
    one that has no remainders.

    >>> _coefficient(3600), _coefficient(Decimal("0.25")), _coefficient(100)
    (36, 25, 0)
    """
    if not isinstance(given, int | Decimal) or isinstance(given, bool) or given <= 0:
        return 0
    digits = str(given) if isinstance(given, int) else "".join(map(str, given.as_tuple().digits))
    number = _count(digits.rstrip("0") or "0")
    return number if number > 1 else 0
