"""Keys and values of e4m3: tokens are transformers' own over a cache that rounds likewise, however prefill is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from llm_service.request import SamplingParams
from llm_service.settings import CacheDtype
from testkit import reference
from testkit.local_engine import LocalEngine, make_prompt
from tests.parity.cases import PROMPTS

TOKENS = 32
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)


def test_tokens_are_the_reference_s_over_a_cache_that_rounds(checkpoints: Callable[..., Path]) -> None:
    folder = checkpoints("qwen3_vl")
    prompts = [make_prompt(folder, PROMPTS[name]) for name in ("text", "image, text, image", "video")]
    expected = [
        reference.reference_generate(folder, prompt.inputs, TOKENS, **{reference.CACHE: _RoundingCache()})
        for prompt in prompts
    ]
    for settings in ({}, {"step_tokens": 16}, {"step_tokens": 40, "prefix_cache": True}):
        engine = LocalEngine(folder, kv_cache_dtype=CacheDtype.FP8, **settings)
        assert [outcome.tokens for outcome in engine.run(prompts, GREEDY)] == expected
        (again,) = engine.run(prompts[1:2], GREEDY)
        assert (again.tokens, again.cached > 0) == (expected[1], "prefix_cache" in settings)


class _RoundingCache(DynamicCache):
    def update(self, key: Tensor, value: Tensor, *given: Any, **more: Any) -> tuple[Tensor, Tensor]:
        return super().update(_rounded(key), _rounded(value), *given, **more)


def _rounded(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)
