"""KV blocks that go to the host's memory and come back, as seen from outside the LLM service."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import pictures
from tests.launch import llm_server
from tests.rpc.pairs import LLM_FLAGS, Pair, about, answer, asked, greedy, tokens, usable
from tests.scrape import scrape
from tests.waiting import until
from twinlens import LlmClient

SHOWN = [
    about(pictures.encoded(pictures.noise(192, 128, 9_200 + n)), f"Tell me all about it, number {n}, " * 4)
    for n in range(5)
]
TIGHT: dict[str, object] = {**LLM_FLAGS, "kv_cache_bytes": "640KiB", "metrics_listen": "127.0.0.1:0"}


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_conversations_that_had_to_make_way_are_found_again_and_answered_alike(qwen3: Pair, tp: int) -> None:
    """Of five, the cache holds one or two."""
    expected = [tokens(qwen3.text, asked(each)) for each in SHOWN]
    flags = {**TIGHT, "kv_cache_bytes": f"{640 // tp}KiB", "kv_host_bytes": "8MiB", "tp": tp}
    with (
        llm_server(qwen3.checkpoint, qwen3.encoder.address, light=False, **flags) as llm,
        LlmClient(llm.address) as text,
    ):
        until(lambda: usable(text, 1), "the encoder is usable")
        assert [tokens(text, asked(each)) for each in SHOWN] == expected
        for each, said in zip(SHOWN, expected, strict=True):
            again = answer(text, asked(each))
            assert again.choices[0].token_ids == said
            assert again.usage.cached_tokens > again.usage.prompt_tokens - 17
        load = text.get_load()
        assert load.kv_blocks_loaded > load.kv_blocks_total
        assert 0 < load.kv_host_blocks_used <= load.kv_host_blocks_total
        assert load.kv_blocks_offloaded >= load.kv_host_blocks_used
        until(lambda: scrape(llm.metrics)["twinlens_llm_kv_blocks_loaded_total"] == load.kv_blocks_loaded, "a beat")
        text.flush_cache()
        assert text.get_load().kv_host_blocks_used == 0
        assert answer(text, asked(SHOWN[0], greedy(1))).usage.cached_tokens == 0


def test_without_room_on_the_host_they_are_computed_again(qwen3: Pair) -> None:
    with (
        llm_server(qwen3.checkpoint, qwen3.encoder.address, light=False, **TIGHT) as llm,
        LlmClient(llm.address) as text,
    ):
        until(lambda: usable(text, 1), "the encoder is usable")
        for each in SHOWN:
            answer(text, asked(each))
        assert answer(text, asked(SHOWN[0])).usage.cached_tokens < 17
        load = text.get_load()
        assert (load.kv_host_blocks_total, load.kv_blocks_offloaded, load.kv_blocks_loaded) == (0, 0, 0)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"kv_host_bytes": "1MiB", "prefix_cache": "no"}, "--kv-host-bytes needs --prefix-cache"),
        ({"kv_host_bytes": "1B"}, "--kv-host-bytes is too small for this model"),
    ],
)
def test_what_cannot_be_ends_the_start_with_a_sentence(qwen3: Pair, flags: dict[str, object], why: str) -> None:
    launch = llm_server(Path(qwen3.checkpoint), light=False, **{**LLM_FLAGS, **flags})
    with pytest.raises(RuntimeError, match=why), launch:
        pass
