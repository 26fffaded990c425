"""The guess at what the engine's cache covers: never more than was computed, per tenant, and bounded."""

from __future__ import annotations

import hashlib

from common.media.item import Grid, Header, Modality
from llm_service.generation.prefixes import Prefixes
from llm_service.request import MediaRun, PromptLayout, Span

BLOCK = 4


def layout(*parts: int | str) -> PromptLayout:
    """A prompt of tokens and of pictures, named by texts, of four rows each."""
    ids: list[int] = []
    spans: list[Span] = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            continue
        key = hashlib.sha256(part.encode()).digest()
        header = Header(key, Modality.IMAGE, Grid(1, 2, 8), 4)
        spans.append(Span(len(spans), header, (MediaRun(len(ids), 0, 4),)))
        ids += [99] * 4
    return PromptLayout(ids, spans)


def test_a_prompt_that_was_computed_is_covered_and_so_is_one_that_goes_on() -> None:
    prefixes = Prefixes(lambda: BLOCK)
    prompt = layout(1, 2, "a", 3, 4, "b", 5, 6, 7, 8)
    assert prefixes.covered(prompt, "") == set()
    prefixes.remember(prompt, "")
    assert prefixes.covered(prompt, "") == {0, 1}
    assert prefixes.covered(layout(1, 2, "a", 3, 4, "b", 5, 6, 9, 9, 9, "c", 1, 1, 1, 1), "") == {0, 1}


def test_what_stands_before_a_picture_and_which_picture_it_is_count() -> None:
    prefixes = Prefixes(lambda: BLOCK)
    prefixes.remember(layout(1, 2, "a", 3, 4, "b", 5, 6, 7, 8), "")
    assert prefixes.covered(layout(1, 3, "a", 3, 4, "b", 5, 6, 7, 8), "") == set()
    assert prefixes.covered(layout(1, 2, "b", 3, 4, "b", 5, 6, 7, 8), "") == set()
    assert prefixes.covered(layout(1, 2, "a", 3, 5, "b", 5, 6, 7, 8), "") == {0}
    assert prefixes.covered(layout(1, 2, "a", 3, 4, "c", 5, 6, 7, 8), "") == {0}


def test_tenants_share_nothing() -> None:
    prefixes = Prefixes(lambda: BLOCK)
    prompt = layout(1, 2, "a", 3, 4, 5, 6)
    prefixes.remember(prompt, "one")
    assert prefixes.covered(prompt, "another") == set()


def test_a_span_that_reaches_into_the_last_block_is_not_covered() -> None:
    prefixes = Prefixes(lambda: BLOCK)
    short = layout(1, 2, "a", 3)  # 7 tokens: one whole block before the last token, and the span ends at 6
    prefixes.remember(short, "")
    assert prefixes.covered(short, "") == set()
    assert prefixes.covered(layout(1, 2, "a", 3, 4, 5), "") == {0}


def test_without_a_prefix_cache_nothing_is_covered() -> None:
    prefixes = Prefixes(lambda: None)
    prompt = layout(1, 2, "a", 3, 4, 5, 6)
    prefixes.remember(prompt, "")
    assert prefixes.covered(prompt, "") == set()


def test_the_longest_unused_is_forgotten_first() -> None:
    prefixes = Prefixes(lambda: BLOCK, max_entries=2)
    prompts = [layout(1, 2, name, 3, 4, 5, 6) for name in "abc"]
    prefixes.remember(prompts[0], "")
    prefixes.remember(prompts[1], "")
    prefixes.covered(prompts[0], "")
    prefixes.remember(prompts[2], "")
    assert [prefixes.covered(prompt, "") for prompt in prompts] == [{0}, set(), {0}]
