"""What an engine is told before anything else. A noun: it imports nobody."""

from __future__ import annotations

import msgspec


class EngineSettings(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What to load, where, and how much to hold; sizes are in bytes for each rank, `rank_timeout` in seconds.

    `kv_cache_bytes` 0: `kv_memory_share` of what is free; that 0: the default for the device.
    """

    model: str
    device: str
    dtype: str
    threads: int
    tensor_parallel: int
    rank_timeout: float
    attention: str
    graphs: str
    graph_bytes: int
    kv_cache_bytes: int
    kv_memory_share: float
    block_size: int
    max_context: int
    max_running: int
    max_step_tokens: int
    prefix_cache: bool
    keep_media_whole: bool
    overlap: bool
    row_bytes: int
    row_levels: int
    log_level: str
