"""Keys and values in 8 bits: tokens are transformers' own over a cache that rounds as ours, however prefill is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llm_service.request import SamplingParams
from tests import reference
from tests.checkpoints import Family
from tests.parity.local_engine import LocalEngine, make_prompt
from tests.parity.test_llm_parity import PROMPTS

from transformers import DynamicCache  # isort: skip

TOKENS = 32
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)


def rounded(x: Tensor) -> Tensor:
    """[…, head_dim], each vector in steps of a 127th of its largest number."""
    step = x.abs().max(-1, keepdim=True).values / 127
    return torch.where(step > 0, torch.floor(x / step + 0.5) * step, x)


class RoundingCache(DynamicCache):
    def update(self, key: Tensor, value: Tensor, *given: Any, **more: Any) -> tuple[Tensor, Tensor]:
        return super().update(rounded(key), rounded(value), *given, **more)


@pytest.mark.parametrize("family", [pytest.param("qwen2_vl", marks=pytest.mark.soak), "qwen3_vl"])
def test_tokens_are_the_reference_s_over_a_cache_that_rounds(family: Family, checkpoints: Callable[..., Path]) -> None:
    folder = checkpoints(family)
    prompts = [make_prompt(folder, PROMPTS[name]) for name in ("text", "image, text, image", "video")]
    expected = [
        reference.reference_generate(folder, prompt.inputs, TOKENS, **{reference.CACHE: RoundingCache()})
        for prompt in prompts
    ]
    for settings in ({}, {"step_tokens": 16}, {"step_tokens": 40, "prefix_cache": True}):
        engine = LocalEngine(folder, int8_cache=True, **settings)
        assert [outcome.tokens for outcome in engine.run(prompts, GREEDY)] == expected
        (again,) = engine.run(prompts[1:2], GREEDY)
        assert (again.tokens, again.cached > 0) == (expected[1], "prefix_cache" in settings)
