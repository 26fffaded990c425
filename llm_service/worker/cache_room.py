"""What a rank keeps of sequences, within its memory."""

from __future__ import annotations

from dataclasses import dataclass

from llm_service.layers.cache_spec import block_bytes, slot_bytes
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.models.model import Model
from llm_service.settings import EngineSettings
from llm_service.worker.draft_loader import Drafting
from llm_service.worker.memory import block_count, host_block_count, slot_count, snapshot_count


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
