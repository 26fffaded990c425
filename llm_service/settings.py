"""What an engine is told before anything else. A noun: it imports nobody."""

from __future__ import annotations

import msgspec


class EngineSettings(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What to load, where, and how much to hold; sizes are in bytes for each rank, `rank_timeout` in seconds."""

    model: str
    device: str
    dtype: str
    threads: int
    tensor_parallel: int
    rank_timeout: float
    kv_cache_bytes: int
    block_size: int
    max_context: int
    max_running: int
    max_step_tokens: int
    prefix_cache: bool
    row_bytes: int
    row_levels: int
    log_level: str
    keep_media_whole: bool
    overlap: bool
