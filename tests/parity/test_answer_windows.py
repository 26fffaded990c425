"""Answers whose tokens see all of the prompt and a window of themselves, as Unlimited-OCR's: the library's tokens,
whatever happens to them, and of no use to prompts that go on behind them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import pytest
import torch

from llm_service.engine.block_identity import BlockIdentities
from llm_service.request import PromptLayout, TokenPrompt
from tests.parity.library_side import GREEDY, Served
from tests.parity.local_engine import LocalEngine, Prompt, misled_drafts
from tools.models.prompts import PROMPTS
from tools.models.reference import TOKENS, Reference
from tools.models.tiny import make

WINDOW = 24
"""Of the recipe: shorter than an answer."""


@dataclass(frozen=True)
class Case:
    """A checkpoint, prompts, and the tokens that the library answers with."""

    served: Served
    library: Reference
    prompts: list[Prompt]
    expected: list[list[int]]

    def said_by(self, engine: LocalEngine) -> list[list[int]]:
        return [outcome.tokens for outcome in engine.run(self.prompts, GREEDY)]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = make("unlimited_ocr", tmp_path_factory.mktemp("unlimited"))
    served, library = Served.of(folder), Reference(folder)
    asked = [PROMPTS["text"], ["Who was the first to draw a map of the moon?"], PROMPTS["one picture"]]
    expected = [library.tokens(library.inputs(parts)) for parts in asked]
    return Case(served, library, [served.prompt(parts) for parts in asked], expected)


def test_after_a_preemption_what_was_said_is_computed_again_as_an_answer(case: Case) -> None:
    blocks = sum(-(-(len(prompt.layout.ids) + TOKENS) // 16) for prompt in case.prompts)
    tight = case.served.engine(blocks=blocks - 2, max_running=3, prefix_cache=True)
    assert case.said_by(tight) == case.expected
    assert tight.scheduler.counters.preemptions > 0, "the cache was not tight enough to prove anything"


def test_drafts_are_verified_within_the_window(case: Case) -> None:
    engine = case.served.engine(speculative_tokens=4, draft=misled_drafts(case.expected))
    assert case.said_by(engine) == case.expected
    assert engine.scheduler.counters.accepted_draft_tokens > 0


def test_a_prompt_that_goes_on_behind_an_answer_has_no_blocks_of_it(case: Case) -> None:
    engine, first = case.served.engine(prefix_cache=True), case.prompts[0]
    said = engine.run([first], GREEDY)[0].tokens
    ids = [*first.layout.ids, *said, *first.layout.ids[:5]]
    layout: PromptLayout = case.served.builder.layout(case.served.builder.pieces(TokenPrompt(ids), []), [])
    found = engine.run([Prompt(layout, [], {})], GREEDY)[0]
    given = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
    assert found.tokens == case.library.tokens(given)
    assert found.cached == len(first.layout.ids) // 16 * 16
    assert engine.run([Prompt(layout, [], {})], GREEDY)[0].cached == (len(ids) - 1) // 16 * 16


def test_blocks_differ_from_where_an_answer_begins() -> None:
    tokens = array("i", range(16))
    plain, early, late = (BlockIdentities(b"root", [], *other).first(4, tokens, 4) for other in ((), (4,), (10,)))
    assert [one == other for one, other in zip(plain, early, strict=True)] == [True, False, False, False]
    assert [one == other for one, other in zip(plain, late, strict=True)] == [True, True, False, False]
    assert not {*early[1:]} & {*late[2:]}
