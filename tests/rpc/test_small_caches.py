"""A service whose keys and values are kept in 8 bits answers, on one rank or several, with drafts or without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import pictures
from tests.cache_scales import publish
from tests.eagle_checkpoint import eagle_head
from tests.launch import llm_server
from tests.rpc.pairs import LLM_FLAGS, Pair, answer, asked, greedy
from twinlens import LlmClient, image, user, v1

PICTURE = image(pictures.encoded(pictures.noise(64, 48, 7)))
FLAGS: dict[str, Any] = {**LLM_FLAGS, "dtype": "float32"}
DRAFTS: dict[str, Any] = {"speculative_tokens": 3, "overlap": "auto"}


@pytest.mark.parametrize("kept", ["int8", "fp8", "fp8_e4m3"])
def test_it_answers_the_same_from_what_it_keeps(qwen3: Pair, kept: str) -> None:
    prompt = user(PICTURE, "What is it?")
    flags = {**FLAGS, "encoders": qwen3.encoder.address, "kv_cache_dtype": kept}
    with llm_server(qwen3.checkpoint, **flags) as llm, LlmClient(llm.address) as text:
        first, again = (answer(text, asked(prompt, greedy(12))) for _ in range(2))
        assert first.choices[0].token_ids == again.choices[0].token_ids
        assert len(first.choices[0].token_ids) == 12
        assert again.started.cached_tokens > 0


@pytest.fixture(scope="module")
def scaled(qwen3: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with a scale for each head of keys and of values."""
    folder = tmp_path_factory.mktemp("scaled") / "model"
    publish(qwen3.checkpoint, folder, "a scale a head")
    return folder


REQUESTS = [
    asked(user(PICTURE, "What is it?"), greedy(24)),
    asked(user("Say it again: red red red"), greedy(40)),
    asked(user("Which?"), v1.SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=16)),
]


def said(checkpoint: Path, encoder: str, **flags: Any) -> Iterator[list[list[int]]]:
    """What a service answers, twice: the second time from what it has kept."""
    with llm_server(checkpoint, encoder, light=False, **FLAGS | flags) as llm, LlmClient(llm.address) as text:
        for _ in range(2):
            answers = [answer(text, request) for request in REQUESTS]
            yield [choice.token_ids for each in answers for choice in each.choices]
        assert answers[0].started.cached_tokens > 0
        assert bool(text.get_load().draft_tokens) == ("speculative_tokens" in flags)


@pytest.fixture(scope="module")
def alone(scaled: Path, qwen3: Pair) -> list[list[int]]:
    """What one rank without drafts answers."""
    first, again = said(scaled, qwen3.encoder.address, kv_cache_dtype="fp8")
    assert first == again
    (plain, _) = said(scaled, qwen3.encoder.address, kv_cache_dtype="auto")
    assert plain != first, "scales by which much is lost"
    return first


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({"tp": 2}, id="ranks", marks=pytest.mark.soak),
        pytest.param({**DRAFTS, "draft_model": "itself", "tp": 2}, id="a draft model of the first rank"),
        pytest.param({**DRAFTS, "draft_model": "itself"}, id="a draft model", marks=pytest.mark.soak),
        pytest.param({**DRAFTS, "draft_model": "head", "speculative_method": "eagle3"}, id="EAGLE-3"),
        pytest.param(DRAFTS, id="look-up", marks=pytest.mark.soak),
        pytest.param({"tp": 2, "kv_host_bytes": "4MiB"}, id="ranks with blocks on the host", marks=pytest.mark.soak),
    ],
)
def test_ranks_and_drafts_change_no_token_over_a_cache_of_e4m3_with_scales(
    flags: dict[str, Any], alone: list[list[int]], scaled: Path, qwen3: Pair, tmp_path: Path
) -> None:
    made = {"itself": lambda: scaled, "head": lambda: eagle_head(scaled, tmp_path / "head")}
    if named := flags.get("draft_model"):
        flags = {**flags, "draft_model": made[named]()}
    for answers in said(scaled, qwen3.encoder.address, kv_cache_dtype="fp8", **flags):
        assert answers == alone
