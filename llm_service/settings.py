"""The settings of an engine process."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from common.hf.description import HfModel

DRAFT_HEADS = "mtp", "eagle3"
"""Methods of speculation that go on from hidden states of the model that verifies."""


class CacheDtype(StrEnum):
    """The element type of the KV cache."""

    AUTO = "auto"
    """As they are computed."""
    INT8 = "int8"
    """8 bits, with a scale for each token and head."""
    FP8 = "fp8"
    """e4m3, with the checkpoint's scales, or a scale of 1."""


class EngineSettings(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The model to load, where, and the sizes of everything; sizes are in bytes for each rank, `rank_timeout` in
    seconds.

    There are `max_loras` slots for adapters, 0 without a `lora_dir`; an adapter's base must be among `base_names`.

    `kv_cache_bytes` 0 means `kv_memory_share` of free memory, and that 0 the device's default. `kv_host_bytes` is the
    host memory for evicted blocks, 0: none; `kv_host_fd` is the shared memory in which all ranks of the host have
    theirs, one after the other, 0: each has its own. With `kv_events` the front is told which blocks can be found.
    `kv_cache_suggested`: `kv_cache_dtype` is the checkpoint's suggestion. `hf` describes a model that transformers
    computes; None for a family of ours. `grows_steps`: `max_step_tokens` is the device's default, and may grow for a
    model that computes an item's rows, or a prompt, at once.
    """

    model: str
    device: str
    dtype: str
    weight_dtype: str
    threads: int
    tensor_parallel: int
    nodes: int
    rendezvous: str
    rank_timeout: float
    symmetric_memory: bool
    expert_parallel: bool
    attention: str
    kernels: str
    compile: bool
    graphs: str
    graph_bytes: int
    kv_cache_dtype: CacheDtype
    kv_cache_suggested: bool
    kv_cache_bytes: int
    kv_memory_share: float
    snapshot_share: float
    block_size: int
    max_context: int
    max_running: int
    max_step_tokens: int
    decode_slowdown: float
    core_share: bool
    prefix_cache: bool
    keep_media_whole: bool
    early_prefill_tokens: int
    overlap: bool
    speculative_tokens: int
    speculative_method: str
    draft_model: str
    session_share: float
    structure_cache_bytes: int
    row_arena_bytes: int
    row_levels: int
    row_mirror: bool
    log_level: str
    lora_dir: str = ""
    max_loras: int = 0
    max_lora_rank: int = 0
    base_names: tuple[str, ...] = ()
    hf: HfModel | None = None
    grows_steps: bool = False
    kv_host_bytes: int = 0
    kv_events: bool = False
    kv_host_fd: int = 0

    @property
    def draft_rows(self) -> int:
        """Most tokens of a step that verifies drafts: as many as a device computes while it reads weights of 16 bits,
        for a GPU by its ratio of arithmetic to memory bandwidth."""
        return min(self.max_step_tokens, 16 if self.device == "cpu" else 256)


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The rank of a process in its tensor-parallel group, and where the group meets.

    `size` ranks are spread evenly over `nodes` hosts, and `device` is the first of each host; a rank that is silent for
    `timeout` seconds is lost. `model` is the checkpoint's path on this host.
    """

    rank: int
    size: int
    nodes: int
    host: str
    port: int
    timeout: float
    device: str
    model: str
    threads: int

    @property
    def ranks_per_host(self) -> int:
        """Ranks of each host."""
        return self.size // self.nodes

    @property
    def is_on_first_host(self) -> bool:
        """Whether this rank runs on the host of rank 0."""
        return self.rank < self.ranks_per_host

    @property
    def device_name(self) -> str:
        """This rank's device.

        >>> place = RankPlace(rank=5, size=8, nodes=2, host="", port=0, timeout=4, device="cuda:2", model="", threads=0)
        >>> place.device_name
        'cuda:3'
        """
        kind, _, first = self.device.partition(":")
        return kind if kind == "cpu" else f"{kind}:{int(first or 0) + self.rank % self.ranks_per_host}"


class Joined(msgspec.Struct, frozen=True, tag=True):
    """A rank has joined its group and loaded its partition of the model."""
