"""Mixed load on real services, for as long as `--soak-seconds` says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rpc.pairs import pair
from tests.soak.mixed_load import Load

MIB = 1 << 20
CACHE = 16 * MIB
"""Bytes of the KV cache; small, so that it is full, and all of its memory touched, before the first measurement."""


@pytest.mark.soak
def test_every_request_ends_once_with_its_own_answer_and_memory_stays(
    checkpoints: Callable[..., Path], pytestconfig: pytest.Config
) -> None:
    seconds = pytestconfig.getoption("soak_seconds")
    tight = {"kv_cache_bytes": CACHE, "row_cache_bytes": "4MiB", "max_running": 16}
    with pair(checkpoints("qwen3_vl"), light=False, fork=False, **tight) as both:
        report = Load(both, seconds).run()
        print(f"\n{sum(report.outcomes.values())} requests in {seconds:g} s: {dict(sorted(report.outcomes.items()))}")
        print("MiB of encoder and LLM service:", report.curve(12))
        assert report.wrong == []
        # Memory has stopped growing by then, where six processes share two cores as well: 334 MiB at first, 346 after
        # five seconds and 349 after a minute.
        for name, (before, after) in zip(("encoder", "LLM"), report.growth(seconds / 2), strict=True):
            assert after - before <= max(0.05 * before, 32 * MIB), name
        assert report.outcomes["answered"] > 0.2 * sum(report.outcomes.values())
        load = both.text.get_load()
        assert load.kv_blocks_total > load.kv_blocks_used
