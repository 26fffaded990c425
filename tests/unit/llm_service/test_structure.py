"""The engine's side of structures: compiled once, kept within a bound, and a state of its own for each answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from common.checkpoint import Checkpoint
from llm_service.engine.structure import Matchers, Structures
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
