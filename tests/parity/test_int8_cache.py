"""Keys and values in 8 bits: tokens are transformers' own over a cache that rounds as ours, however prefill is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llm_service.request import SamplingParams
from llm_service.settings import CacheDtype
from testkit import reference
from testkit.checkpoints import Family
from testkit.local_engine import LocalEngine, make_prompt
from tests.parity.cases import PROMPTS, RoundingCache

TOKENS = 32
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("family", [pytest.param("qwen2_vl", marks=pytest.mark.soak), "qwen3_vl"])
def test_tokens_are_the_reference_s_over_a_cache_that_rounds(family: Family, checkpoints: Callable[..., Path]) -> None:
    folder = checkpoints(family)
    prompts = [make_prompt(folder, PROMPTS[name]) for name in ("text", "image, text, image", "video")]
    expected = [
        reference.reference_generate(folder, prompt.inputs, TOKENS, **{reference.CACHE: RoundingCache()})
        for prompt in prompts
    ]
    for settings in ({}, {"step_tokens": 16}, {"step_tokens": 40, "prefix_cache": True}):
        engine = LocalEngine(folder, kv_cache_dtype=CacheDtype.INT8, **settings)
        assert [outcome.tokens for outcome in engine.run(prompts, GREEDY)] == expected
        (again,) = engine.run(prompts[1:2], GREEDY)
        assert (again.tokens, again.cached > 0) == (expected[1], "prefix_cache" in settings)
