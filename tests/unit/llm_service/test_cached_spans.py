"""The guess at what the engine's cache covers: never more than was computed, per tenant, and bounded."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import replace

import numpy as np

from common.media.item import Grid, Header, Modality
from llm_service.engine.prompt_identities import block_identities, keyed_runs
from llm_service.generation.cached_spans import CachedSpans
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


def identified(prompt: PromptLayout, salt: str) -> PromptLayout:
    positions = np.tile(np.arange(len(prompt.ids), dtype=np.int32), (3, 1)).tobytes()
    runs = keyed_runs((span.header.rows_key, span.runs) for span in prompt.spans)
    return replace(prompt, identities=block_identities(array("i", prompt.ids), positions, runs, salt, b"", BLOCK))


def remember(spans: CachedSpans, prompt: PromptLayout, salt: str = "") -> None:
    spans.remember(identified(prompt, salt))


def find(spans: CachedSpans, prompt: PromptLayout, salt: str = "") -> set[int]:
    return spans.find(identified(prompt, salt))


PROMPT = layout(1, 2, "a", 3, 4, "b", 5, 6, 7, 8)
"""The pictures end within the second and at the end of the third block."""


def test_a_prompt_that_was_computed_is_covered_and_so_is_one_that_goes_on() -> None:
    spans = CachedSpans(BLOCK)
    assert find(spans, PROMPT) == set()
    remember(spans, PROMPT)
    assert find(spans, PROMPT) == {0, 1}
    assert find(spans, layout(1, 2, "a", 3, 4, "b", 9, 9, 9, 9, 9, "c", 1, 1, 1, 1)) == {0, 1}


def test_what_stands_before_a_picture_and_which_picture_it_is_count() -> None:
    spans = CachedSpans(BLOCK)
    remember(spans, PROMPT)
    assert find(spans, layout(1, 3, "a", 3, 4, "b", 5, 6, 7, 8)) == set()
    assert find(spans, layout(1, 2, "b", 3, 4, "b", 5, 6, 7, 8)) == set()
    assert find(spans, layout(1, 2, "a", 3, 4, "c", 5, 6, 7, 8)) == {0}


def test_another_text_in_the_block_where_a_picture_ends_leaves_it_uncovered() -> None:
    """The block is another one then, and some of the rows must be computed again."""
    spans = CachedSpans(BLOCK)
    remember(spans, PROMPT)
    assert find(spans, layout(1, 2, "a", 3, 5, "b", 5, 6, 7, 8)) == set()


def test_tenants_share_nothing() -> None:
    spans = CachedSpans(BLOCK)
    remember(spans, PROMPT, "one")
    assert find(spans, PROMPT, "another") == set()


def test_a_span_that_reaches_into_the_last_block_is_not_covered() -> None:
    spans = CachedSpans(BLOCK)
    whole = layout(1, 2, "a", 3, 4)  # its second block is full, and has the last token, which is computed again
    remember(spans, whole)
    assert find(spans, whole) == set()
    assert find(spans, layout(1, 2, "a", 3, 4, 5)) == {0}


def test_without_a_prefix_cache_nothing_is_covered() -> None:
    spans = CachedSpans(BLOCK)
    spans.remember(PROMPT)
    assert spans.find(PROMPT) == set()


def test_the_longest_unused_is_forgotten_first() -> None:
    spans = CachedSpans(BLOCK, max_entries=2)
    prompts = [layout(1, 2, name, 3, 4, 5, 6) for name in "abc"]
    remember(spans, prompts[0])
    remember(spans, prompts[1])
    find(spans, prompts[0])
    remember(spans, prompts[2])
    assert [find(spans, prompt) for prompt in prompts] == [{0}, set(), {0}]
