"""What an engine is told before anything else."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from common.hf.description import HfModel

DRAFT_HEADS = "mtp", "eagle3"
"""Methods of speculation that go on from hidden states of the model that verifies."""


class CacheDtype(StrEnum):
    """What keys and values are kept in."""

    AUTO = "auto"
    """As they are computed."""
    INT8 = "int8"
    """8 bits, with a scale for each token and head."""
    FP8 = "fp8"
    """e4m3, with the checkpoint's scales, or a scale of 1."""


class EngineSettings(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What to load, where, and how much to hold; sizes are in bytes for each rank, `rank_timeout` in seconds.

    There are `max_loras` slots for adapters, 0 where there is no `lora_dir`; an adapter may name as its base what is
    among `base_names`.

    `kv_cache_bytes` 0: `kv_memory_share` of what is free; that 0: the default for the device. `kv_host_bytes` are the
    host's, for blocks that have to make way; 0: none; `kv_host_fd` is the shared memory that all ranks of the host have
    them in, one after the other, 0: each has its own. With `kv_events` the front hears which blocks can be found.
    `kv_cache_suggested`: the checkpoint suggests `kv_cache_dtype`, and nobody asked for it.
    `hf`: what transformers says of a model that it computes; None for a family of ours. `grows_steps`:
    `max_step_tokens` are the device's, and may be more where a model computes an item's rows, or a prompt, at once.
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
        """Tokens of a step that verifies drafts, at most: as many as a device computes while it waits for weights of
        16 bits, those of a GPU by its ratio of arithmetic to memory."""
        return min(self.max_step_tokens, 16 if self.device == "cpu" else 256)


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Which rank of a tensor-parallel group a process is, and where the group meets.

    `size` ranks are spread evenly over `nodes` hosts, `device` is the first one of each host; a rank that is silent for
    `timeout` seconds is lost. `model` is the checkpoint's place on this host.
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
        """This rank runs where rank 0 does."""
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
