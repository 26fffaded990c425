"""What is refused of a structure before it is compiled, and what is not; that looking takes no time to speak of."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llm_service.config import LlmConfig
from llm_service.grammar.foresight import demanded, refusal
from llm_service.request import Structure
from llm_service.server import _structure_limits

LIMITS = _structure_limits(LlmConfig(model="m"))


def schema(**said: Any) -> Structure:
    return Structure("json_schema", json.dumps(said))


def number(multiple: float) -> dict[str, Any]:
    return {"type": "number", "multipleOf": multiple}


CHAIN = {f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(100)} | {"a100": number(3)}

REFUSED = {
    "a multiple": schema(**number(999_983)),
    "the same with a point": schema(**number(99.9983)),
    "the same far inside": schema(properties={"a": {"items": {"anyOf": [{}, number(99_991)]}}}),
    "the same inside a grammar": Structure("grammar", 'start: "a" b\nb: %json {"multipleOf": 999983} "x"'),
    "many of them": schema(properties={f"p{n}": number(997 + n) for n in range(20)}),
    "two of one value": schema(allOf=[number(331), number(337)]),
    "two of one value, inside": schema(allOf=[{"items": number(331)}, {"items": number(337)}]),
    "two by reference": schema(**{"multipleOf": 331, "$ref": "#/$defs/b", "$defs": {"b": {"multipleOf": 337}}}),
    "two to the power of a hundred": schema(**{"$ref": "#/$defs/a0", "$defs": CHAIN}),
    "a count": Structure("regex", "a{1000000}"),
    "counts within counts": Structure("regex", "((a{50}b){50,}c){50,90}"),
    "an endless count": Structure("regex", "a{" + "9" * 5000 + "}"),
    "a count in a pattern": schema(type="string", pattern="^x{70000}$"),
    "a shortest length": schema(type="string", minLength=10_000_000),
    "a least number of items": schema(type="array", minItems=100_000),
    "lists within lists": schema(type="array", minItems=300, items={"minItems": 300, "items": {"const": 1}}),
    "a least number of properties": schema(type="object", minProperties=70_000),
    "a count in a grammar": Structure("grammar", 'start: a~70000\na: "b"'),
    "a count of a text": Structure("grammar", 'start: "b"{70000}'),
    "a count in a grammar's regex": Structure("grammar", "start: A\nA: /b{70000}/"),
    "groups within groups": Structure("regex", "(" * 200 + "a" + ")" * 200),
    "groups of a grammar": Structure("grammar", "start: " + "[" * 200 + '"a"' + "]" * 200),
    "groups in a pattern": schema(pattern="(" * 200 + "a" + ")" * 200),
}

TAKEN = {
    "upper bounds": Structure("regex", "(a{1,1000}){1,1000}b[a-z]{0,1000000}"),
    "several counts": Structure("regex", "(.*a){20}.{300}"),
    "signs that are none": Structure("regex", r"\{70000\}[{70000}\]{9](\(\(|[(]){3}"),
    "texts that look like counts": Structure("grammar", 'start: "{70000}" /[{]70000}/ // ~70000\n'),
    "a longest length": schema(type="string", maxLength=2**31 - 1),
    "a greatest number": schema(type="array", maxItems=2**31 - 1, items={"type": "object", "maxProperties": 2**31 - 1}),
    "round multiples": schema(properties={f"p{n}": number(10.0 ** (n - 5)) for n in range(10)}),
    "usual multiples": schema(properties={f"p{n}": number(m) for n, m in enumerate((0.25, 5, 7, 12, 60, 1024, 3600))}),
    "one that many refer to": schema(
        **{"properties": {f"p{n}": {"$ref": "#/$defs/m"} for n in range(100)}, "$defs": {"m": number(0.05)}}
    ),
    "itself inside itself": schema(properties={"child": {"$ref": "#"}, "value": number(60)}),
    "a property by that name": schema(properties={"minItems": {"type": "integer"}, "multipleOf": {"type": "string"}}),
    "a value by that name": schema(enum=[{"minItems": 10**9, "multipleOf": 10**9 + 7}]),
    "nowhere to be found": schema(**{"$ref": "#/$defs/none/7"}),
    "what is no schema": Structure("json_schema", '{"multipleOf": [1], "minItems": "x", "allOf": {"a": 1}, "$ref": 3}'),
    "what is not even JSON": Structure("json_schema", '{"multipleOf": 1e99999999999999999999999'),
    "a number of 5000 digits": Structure("json_schema", '{"multipleOf": ' + "9" * 5000 + "}"),
    "a schema that never ends": Structure("grammar", "start: %json {"),
    "a long text": Structure("regex", "x" * 65_536),
    "words": Structure("choice", json.dumps([f"w{n}{{99999}}" for n in range(4000)])),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_bound_to_take_too_much_is_refused_and_the_limit_named(name: str) -> None:
    why = refusal(REFUSED[name], LIMITS)
    assert any(str(limit) in why for limit in (LIMITS.multiple, LIMITS.repeats, LIMITS.depth))


@pytest.mark.parametrize("name", TAKEN)
def test_what_may_well_be_compiled_is_not_refused(name: str) -> None:
    assert refusal(TAKEN[name], LIMITS) == ""


def test_a_longer_text_may_be_as_long_as_it_is() -> None:
    """How long a structure may be has a limit of its own."""
    assert refusal(Structure("regex", "x" * 100_000), LIMITS) == ""


@pytest.mark.parametrize("sign", ["[", '"\\', "/\\", '%json {"'])
@pytest.mark.parametrize("kind", ["regex", "grammar"])
def test_what_never_ends_is_looked_at_once(kind: Any, sign: str) -> None:
    """Were all that follows read again at each such sign, this would go on for minutes."""
    assert demanded(Structure(kind, sign * (300_000 // len(sign)))).multiple == 0
