"""`twinlens status --watch`: rates are differences, and an encoder that is gone is a line like any other."""

from __future__ import annotations

import itertools
import re

from twinlens import v1
from twinlens.cli.watch import Sample, tables


def sample(at: float, tokens: int, items: int | None) -> Sample:
    llm = v1.LlmServiceGetLoadResponse(
        waiting=3, running=2, kv_blocks_used=5, kv_blocks_total=20, generated_tokens=tokens, rows_received=4 * tokens
    )
    encoder = None
    if items is not None:
        sent = [v1.RowsSent(transport=v1.TRANSPORT_INLINE, rows=items, bytes=items << 20)]
        encoder = v1.EncoderServiceGetLoadResponse(
            queued_items=7, encoded_items=items, store_hits=items, store_misses=3 * items, rows_sent=sent
        )
    return Sample(at, llm, {"here:1": encoder})


def test_rates_are_those_since_the_sample_before() -> None:
    moments = iter([sample(10.0, 100, 1), sample(12.0, 160, 5), sample(14.0, 160, 5)])
    first, second, third = itertools.islice(tables(lambda: next(moments)), 3)
    assert "tokens/s" not in first
    assert "30.0 tokens/s" in second
    assert "120.0 rows/s" in second
    assert "KV 25%" in second
    line = next(line for line in second.splitlines() if line.startswith("encoder here:1"))
    assert "2.0 items/s" in line
    assert "2.0 MiB/s" in line
    assert "25%" in line, "of 16 asked for, 4 were in the store"
    assert "0.0 tokens/s" in third


def test_an_encoder_that_does_not_answer_is_said_so_and_may_come_back() -> None:
    moments = iter([sample(1.0, 0, 1), sample(2.0, 0, None), sample(3.0, 0, 2)])
    _, gone, back = itertools.islice(tables(lambda: next(moments)), 3)
    assert "no answer" in gone
    assert "no answer" not in back
    assert "0.0 items/s" in back, "nothing is known of how it was before"


def test_totals_that_begin_anew_give_no_negative_rates() -> None:
    """An encoder, or an engine, that was replaced between two samples counts from nothing."""
    moments = iter([sample(10.0, 100, 9), sample(12.0, 40, 4)])
    _, after = itertools.islice(tables(lambda: next(moments)), 2)
    assert "20.0 tokens/s" in after
    assert "2.0 items/s" in after
    assert "2.0 MiB/s" in after
    assert not re.search(r"-\d", after)


def test_an_llm_service_that_does_not_answer_for_a_moment_is_said_so_and_may_come_back() -> None:
    gone = Sample(2.0, None, sample(2.0, 0, 1).encoders)
    moments = iter([sample(1.0, 100, 1), gone, sample(3.0, 50, 1)])
    _, silent, back = itertools.islice(tables(lambda: next(moments)), 3)
    assert [line for line in silent.splitlines() if line.startswith("LLM") and "no answer" in line]
    assert "0.0 tokens/s" in back, "nothing is known of how it was before"
