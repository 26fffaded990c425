"""A service whose keys and values are kept in 8 bits answers."""

from __future__ import annotations

import pytest

from tests import pictures
from tests.launch import llm_server
from tests.rpc.pairs import LLM_FLAGS, Pair, answer, asked, greedy
from twinlens import LlmClient, image, user


@pytest.mark.parametrize("kept", ["int8", "fp8", "fp8_e4m3"])
def test_it_answers_the_same_from_what_it_keeps(qwen3: Pair, kept: str) -> None:
    prompt = user(image(pictures.encoded(pictures.noise(64, 48, 7))), "What is it?")
    flags = {**LLM_FLAGS, "encoders": qwen3.encoder.address, "kv_cache_dtype": kept, "dtype": "float32"}
    with llm_server(qwen3.checkpoint, **flags) as llm, LlmClient(llm.address) as text:
        first, again = (answer(text, asked(prompt, greedy(12))) for _ in range(2))
        assert first.choices[0].token_ids == again.choices[0].token_ids
        assert len(first.choices[0].token_ids) == 12
        assert again.started.cached_tokens > 0
