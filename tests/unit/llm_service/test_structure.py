"""The engine's side of structures: compiled once, kept within a bound, and a state of its own for each answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from common.checkpoint import Checkpoint
from llm_service.engine.structure import Matcher, Matchers, Structures
from llm_service.prompt import PromptBuilder
from llm_service.request import Structure
from tests.checkpoints import VOCABULARY
from tests.waiting import until


@pytest.fixture
def structures(checkpoints: Callable[..., Path]) -> Structures:
    return Structures(Checkpoint(checkpoints("qwen3_vl")), VOCABULARY, [0])


def allowed(mask: bytes) -> set[int]:
    return {token for token in range(VOCABULARY) if mask[token // 8] >> token % 8 & 1}


def test_no_more_compiled_grammars_are_kept_than_the_bound_and_the_longest_unused_goes(
    structures: Structures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llm_service.engine.structure._CACHED", 2)
    a, b, c = (structures.grammar(Structure("regex", f"{letter}+")) for letter in "abc")
    for grammar in (a, b, a, c):
        structures.matcher(grammar)
    assert list(structures._compiled) == [a, c]


def test_two_answers_of_one_grammar_do_not_move_each_other(structures: Structures, builder: PromptBuilder) -> None:
    grammar = structures.grammar(Structure("regex", "xy"))
    one, other = structures.matcher(grammar), structures.matcher(grammar)
    x, y = builder.encode("x")[0], builder.encode("y")[0]
    assert one.consume_token(x)
    assert y in allowed(one.compute_bitmask())
    assert y not in allowed(other.compute_bitmask())
    assert x in allowed(other.compute_bitmask())


def test_a_matcher_is_made_beside_whoever_asks_and_that_is_told(structures: Structures) -> None:
    made: list[bool] = []
    future = Matchers(structures, lambda: made.append(True))(structures.grammar(Structure("choice", '["yes", "no"]')))
    until(lambda: bool(made), "it is told")
    assert future.done()
    assert not future.result().is_stopped()


def walk(matcher: Matcher, word: int, most: int) -> int:
    """How often a word can follow itself before the matcher turns to error, or `most`."""
    for count in range(most):
        matcher.compute_bitmask()
        if matcher.is_error() or not matcher.consume_token(word):
            return count
    return most


def test_a_grammar_with_countless_readings_of_a_text_ends_and_holds_nobody_up(
    structures: Structures, builder: PromptBuilder
) -> None:
    """The more there are, the longer a mask takes, and all requests wait for it."""
    (word,) = builder.encode("a")
    countless = structures.matcher(structures.grammar(Structure("grammar", 'start: a\na: a a | "a" | "b" | ""')))
    assert 100 < walk(countless, word, 1000) < 500
    assert countless.is_error()
    plain = structures.matcher(structures.grammar(Structure("grammar", "start: /a*/")))
    assert walk(plain, word, 1000) == 1000


def test_large_structures_are_no_countless_ones(structures: Structures, builder: PromptBuilder) -> None:
    words = [f"w{number:04}" for number in range(3000)]
    choice = structures.matcher(structures.grammar(Structure("choice", json.dumps(words))))
    for token in builder.encode("w2999"):
        assert token in allowed(choice.compute_bitmask())
        choice.consume_token(token)
    assert choice.is_stopped()
    assert not choice.is_error()
    wide = json.dumps({"type": "object", "properties": {word: {"type": "string"} for word in words[:190]}})
    schema = structures.matcher(structures.grammar(Structure("json_schema", wide)))
    for token in builder.encode('{"w0'):
        assert token in allowed(schema.compute_bitmask())
        schema.consume_token(token)
    assert not schema.is_error()
