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
    """Both services at one moment; None if one did not answer. `at` is in seconds."""

    at: float
    llm: LlmServiceGetLoadResponse | None
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
    """A table for each sample; rates are since the sample before."""
    before = sample()
    yield _table(before, before)
    while True:
        now = sample()
        yield _table(before, now)
        before = now


def _table(before: Sample, now: Sample) -> str:
    seconds = now.at - before.at
    rows = [_HEADING, _silent("LLM") if now.llm is None else _llm_row(before.llm or now.llm, now.llm, seconds)]
    for address, load in now.encoders.items():
        name, earlier = f"encoder {address}", before.encoders.get(address)
        rows.append(_silent(name) if load is None else _encoder_row(name, earlier or load, load, seconds))
    return table(rows)


def _silent(name: str) -> tuple[str, ...]:
    return (name, "–", "–", "–", "–", "no answer")


def _llm_row(old: LlmServiceGetLoadResponse, new: LlmServiceGetLoadResponse, seconds: float) -> tuple[str, ...]:
    blocks = share(new.kv_blocks_used, new.kv_blocks_total)
    rows = share(new.row_bytes, new.row_capacity_bytes)
    rates = (
        _rate(_grown(old.generated_tokens, new.generated_tokens), seconds, "tokens"),
        _rate(_grown(old.prompt_tokens, new.prompt_tokens), seconds, "prompt tokens"),
        _rate(_grown(old.rows_received, new.rows_received), seconds, "rows"),
    )
    return (
        "LLM",
        str(new.waiting),
        str(new.running),
        f"KV {blocks}, rows {rows}",
        share(
            _grown(old.prefix_hit_tokens, new.prefix_hit_tokens),
            _grown(old.prefix_query_tokens, new.prefix_query_tokens),
        ),
        ", ".join(rates),
    )


def _encoder_row(
    name: str, old: EncoderServiceGetLoadResponse, new: EncoderServiceGetLoadResponse, seconds: float
) -> tuple[str, ...]:
    hits, misses = _grown(old.store_hits, new.store_hits), _grown(old.store_misses, new.store_misses)
    sent = _grown(sum(each.bytes for each in old.rows_sent), sum(each.bytes for each in new.rows_sent))
    rates = (
        _rate(_grown(old.encoded_items, new.encoded_items), seconds, "items"),
        _rate(_grown(old.vit_patches, new.vit_patches), seconds, "patches"),
        f"{size(round(sent / seconds))}/s" if seconds > 0 else "–",
    )
    return (
        name,
        str(new.queued_items),
        str(new.running_items),
        f"store {share(new.store_bytes, new.store_capacity_bytes)}",
        share(hits, hits + misses),
        ", ".join(rates),
    )


def _grown(old: int, new: int) -> int:
    """How much a total has grown; a smaller one has begun anew, with the process that counts.

    >>> _grown(100, 160), _grown(100, 20)
    (60, 20)
    """
    return new - old if new >= old else new


def _rate(count: int, seconds: float, what: str) -> str:
    """Per second; a dash if no time has passed."""
    return f"{count / seconds:,.1f} {what}/s" if seconds > 0 else "–"
