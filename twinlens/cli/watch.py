"""`twinlens status --watch`: queues, caches and throughput of both services, again and again."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from twinlens.cli.tables import share, size, table
from twinlens.v1 import EncoderServiceGetLoadResponse, LlmServiceGetLoadResponse

_CLEAR = "\x1b[H\x1b[2J"
_HEADING = ("service", "queued", "running", "memory", "hits", "throughput")


@dataclass(frozen=True, slots=True)
class Sample:
    """What both sides said at one moment; None stands for an encoder that did not answer. `at` is in seconds."""

    at: float
    llm: LlmServiceGetLoadResponse
    encoders: dict[str, EncoderServiceGetLoadResponse | None]


def run(sample: Callable[[], Sample], seconds: float) -> int:
    """Prints a table every `seconds`, over the one before on a terminal, until interrupted."""
    begin = _CLEAR if sys.stdout.isatty() else ""
    try:
        for text in tables(sample):
            print(f"{begin}{text}\n", flush=True)
            time.sleep(seconds)
    except KeyboardInterrupt:
        return 0
    return 0


def tables(sample: Callable[[], Sample]) -> Iterator[str]:
    """A table for each sample; rates are those since the sample before."""
    before = sample()
    yield _table(before, before)
    while True:
        now = sample()
        yield _table(before, now)
        before = now


def _table(before: Sample, now: Sample) -> str:
    rows = [_HEADING, _llm_row(before, now)]
    for address, load in now.encoders.items():
        earlier = before.encoders.get(address)
        if load is None:
            rows.append((f"encoder {address}", "–", "–", "–", "–", "no answer"))
        else:
            rows.append(_encoder_row(address, earlier or load, load, now.at - before.at))
    return table(rows)


def _llm_row(before: Sample, now: Sample) -> tuple[str, ...]:
    old, new, seconds = before.llm, now.llm, now.at - before.at
    blocks = share(new.kv_blocks_used, new.kv_blocks_total)
    rows = share(new.row_bytes, new.row_capacity_bytes)
    rates = (
        _rate(new.generated_tokens - old.generated_tokens, seconds, "tokens"),
        _rate(new.prompt_tokens - old.prompt_tokens, seconds, "prompt tokens"),
        _rate(new.rows_received - old.rows_received, seconds, "rows"),
    )
    return (
        "LLM",
        str(new.waiting),
        str(new.running),
        f"KV {blocks}, rows {rows}",
        share(new.prefix_hit_tokens - old.prefix_hit_tokens, new.prefix_query_tokens - old.prefix_query_tokens),
        ", ".join(rates),
    )


def _encoder_row(
    address: str, old: EncoderServiceGetLoadResponse, new: EncoderServiceGetLoadResponse, seconds: float
) -> tuple[str, ...]:
    hits, misses = new.store_hits - old.store_hits, new.store_misses - old.store_misses
    sent = sum(each.bytes for each in new.rows_sent) - sum(each.bytes for each in old.rows_sent)
    rates = (
        _rate(new.encoded_items - old.encoded_items, seconds, "items"),
        _rate(new.vit_patches - old.vit_patches, seconds, "patches"),
        f"{size(round(sent / seconds))}/s" if seconds > 0 else "–",
    )
    return (
        f"encoder {address}",
        str(new.queued_items),
        str(new.running_items),
        f"store {share(new.store_bytes, new.store_capacity_bytes)}",
        share(hits, hits + misses),
        ", ".join(rates),
    )


def _rate(count: int, seconds: float, what: str) -> str:
    """How many a second; a dash where no time has passed."""
    return f"{count / seconds:,.1f} {what}/s" if seconds > 0 else "–"
