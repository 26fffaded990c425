"""What a rank's memory is used for besides weights: KV blocks, states, and memory shared with others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.gpu.device_memory import DeviceMemory, DeviceMemoryError, driver
from common.shm.arena import SharedBuffer
from common.telemetry import log
from llm_service.layers.attention.int8_blocks import SCALE_BYTES
from llm_service.layers.cache_spec import IndexedKV, PagedKV, block_bytes, slot_bytes
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.stated_quantization import cache_type_of, suggests_fp8_cache
from llm_service.models.model import Model
from llm_service.settings import CacheDtype, EngineSettings
from llm_service.worker.draft_loader import Drafting
from llm_service.worker.memory import block_count, host_block_count, slot_count, snapshot_count
from llm_service.worker.mirror import Mirror

_log = log.get("load")


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """What a rank keeps of sequences: numbers of KV blocks, state slots, snapshot slots and host blocks, each of as
    many bytes as the rank with the largest has; and the bytes of a block."""

    blocks: int
    slots: int
    snapshots: int = 0
    host_blocks: int = 0
    place_bytes: int = 0
    block_bytes: int = 0


def cache_room(
    settings: EngineSettings,
    decoder: Model,
    drafting: Drafting | None,
    group: TensorGroup,
    budget: int,
    context: int,
) -> CacheRoom:
    """What every rank can keep within its `budget` in bytes. Raises CheckpointError if that is too little."""
    specs = [mixer.cache_spec() for mixer in decoder.mixers()]
    one_slot = slot_bytes(specs)
    one_block = block_bytes(specs, settings.block_size, decoder.kv_dtype, settings.kv_cache_dtype)
    one_block += drafting.block_bytes(settings.block_size) if drafting is not None else 0
    slots = slot_count(settings, one_slot, budget, group)
    budget -= slots * one_slot
    snapshots = snapshot_count(settings, one_slot, budget, group)
    blocks = block_count(settings, one_block, budget - snapshots * one_slot, context, group)
    host_blocks = host_block_count(settings, one_block, one_slot, group)
    largest = -group.all_reduce_min(-one_block) if host_blocks else 0  # the first rank may have a proposer's as well
    return CacheRoom(blocks, slots, snapshots, host_blocks, largest, one_block)


def host_memory(settings: EngineSettings, rank: int) -> memoryview:
    """A rank's part of the memory for blocks that the front has as well; all ranks are on its host."""
    size = settings.kv_host_bytes
    whole = SharedBuffer.attach(settings.kv_host_fd, settings.tensor_parallel * size)
    return whole.view[rank * size : (rank + 1) * size]


def with_cache_dtype(settings: EngineSettings, checkpoint: Checkpoint, decoder: Model) -> EngineSettings:
    """Settings with the type of keys and values as configured, or, if the checkpoint suggests one that is not possible,
    as computed. Raises CheckpointError if the configured one is not possible."""
    try:
        if settings.kv_cache_dtype is not CacheDtype.AUTO:
            check_small_cache(decoder, settings.kv_cache_dtype)
    except CheckpointError:
        if not settings.kv_cache_suggested:
            raise
        settings = msgspec.structs.replace(settings, kv_cache_dtype=CacheDtype.AUTO)
    told = cache_type_of(checkpoint.config)
    if told and (settings.kv_cache_dtype is not CacheDtype.FP8 or not suggests_fp8_cache(checkpoint.config)):
        _log.info("the KV cache is not what the checkpoint suggests", suggested=told, kept=settings.kv_cache_dtype)
    return settings


def check_small_cache(decoder: Model, kept: CacheDtype) -> None:
    """Raises CheckpointError if this model's keys and values cannot be kept in 8 bits."""
    if not decoder.keeps_small_cache:
        raise CheckpointError(f"--kv-cache-dtype {kept} is not for a text that transformers computes")
    for spec in (mixer.cache_spec() for mixer in decoder.mixers()):
        if isinstance(spec, IndexedKV):
            raise CheckpointError(f"--kv-cache-dtype {kept} is not for layers that choose tokens by an index")
        if isinstance(spec, PagedKV) and spec.values_in_keys:
            raise CheckpointError(f"--kv-cache-dtype {kept} is not for latent attention, whose cache is small")
        if kept is CacheDtype.INT8 and isinstance(spec, PagedKV) and spec.head_dim % SCALE_BYTES:
            raise CheckpointError(f"--kv-cache-dtype int8 is for heads of a multiple of {SCALE_BYTES} numbers")


def reachable(settings: EngineSettings, devices: Sequence[torch.device]) -> list[str]:
    """UUIDs of the devices whose memory every rank can read; empty if ranks keep no mirrors."""
    return _memory(devices[0]).reachable(devices) if settings.row_mirror else []


def with_symmetric_memory(group: TensorGroup, dtype: torch.dtype, device: torch.device) -> TensorGroup:
    """The group with sums by symmetric memory, after checking on every rank that they equal NCCL's. Raises
    CheckpointError."""
    from llm_service.layers.gpu.symmetric_sum import SymmetricSum

    assert group.process_group is not None, "there are several ranks"
    why, sums = "", None
    try:
        sums = SymmetricSum(group.process_group, device, dtype)
    except (ValueError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
    if not group.all_reduce_min(int(sums is not None)):
        raise CheckpointError(f"--symmetric-memory: {why or 'another rank has none'}")
    assert sums is not None, "this rank is one of all"
    if not group.all_reduce_min(int(sums.trial(group.sum, group.rank))):
        raise CheckpointError("--symmetric-memory: sums differ from those of NCCL on these GPUs")
    return group.with_sums(sums)


def row_mirror(settings: EngineSettings, device: torch.device, width: int, dtype: torch.dtype) -> Mirror:
    """A mirror of the row arena on this device. Raises CheckpointError if its memory cannot be shared."""
    row_bytes = settings.row_levels * width * dtype.itemsize
    try:
        return Mirror(_memory(device), device, settings.row_arena_bytes, row_bytes, dtype, _beside_steps(device))
    except DeviceMemoryError as error:
        raise CheckpointError(f"--row-mirror: {error}") from error


def _beside_steps(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """A context whose work runs on a stream of its own, so that its end can be waited for while steps run. The thread
    that launches steps waits for it, so this stream has priority."""
    return partial(torch.cuda.stream, torch.cuda.Stream(device, priority=-1)) if device.type == "cuda" else nullcontext


def _memory(device: torch.device) -> DeviceMemory:
    """Raises CheckpointError if this device's memory cannot be shared."""
    try:
        return driver(device)
    except DeviceMemoryError as error:
        raise CheckpointError(f"--row-mirror: {error}") from error
