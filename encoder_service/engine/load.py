"""The engine's load, for callers and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from encoder_service.engine.batch_history import BatchTotals


@dataclass(slots=True)
class ItemTotals:
    """Items since start: `hits`, whose rows were in a store or in flight; `misses`, whose rows had to be computed, and
    `encoded`, whose rows were; `failed`, that ended with an error, unless it was a key without content."""

    hits: int = 0
    misses: int = 0
    encoded: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLoad:
    """The current queues and store, and totals since start. `queued_items` are those that no worker has begun;
    `estimated_seconds` is the time until everything here is computed, by the recent pace, None if unknown;
    `stage_seconds` is the total time of items by stage; `shared_store` is None without one."""

    queued_items: int
    running_items: int
    queued_patches: int
    running_patches: int
    estimated_seconds: float | None
    items: ItemTotals
    store_bytes: int
    store_capacity_bytes: int
    store_entries: int
    shared_store: Mapping[str, int] | None
    workers_alive: int
    worker_busy_seconds: float
    batches: BatchTotals
    decoder_restarts: int
    stage_seconds: Mapping[str, float]
