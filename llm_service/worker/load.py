"""From settings to a runner: what every rank does alike."""

from __future__ import annotations

import os

import torch

from common.arena import SharedBuffer
from common.checkpoint import Checkpoint, CheckpointError
from llm_service.layers.group import TensorGroup
from llm_service.models.config import TextConfig
from llm_service.models.loader import load_decoder
from llm_service.settings import EngineSettings
from llm_service.worker.fusion import RowArena
from llm_service.worker.runner import Runner, block_bytes


def load_runner(settings: EngineSettings, device: torch.device, group: TensorGroup, arena_fd: int) -> Runner:
    """Loads this rank's share of the model and makes its part of the KV cache."""
    torch.set_num_threads(settings.threads or max(1, (os.cpu_count() or 1) // group.size))
    checkpoint = Checkpoint.resolve(settings.model)
    dtype: torch.dtype = getattr(torch, settings.dtype)
    memory = SharedBuffer.attach(arena_fd, settings.row_bytes)
    decoder = load_decoder(checkpoint, dtype, device, group)
    arena = RowArena(memory.view, settings.row_levels, decoder.config.hidden_size, dtype)
    return Runner(decoder, arena, block_count(settings, decoder.config, group), settings.block_size)


def block_count(settings: EngineSettings, config: TextConfig, group: TensorGroup) -> int:
    """KV blocks that each rank's memory holds; the same on all ranks. Raises CheckpointError where it holds none."""
    dtype: torch.dtype = getattr(torch, settings.dtype)
    one = block_bytes(config, group, settings.block_size, dtype.itemsize)
    if settings.kv_cache_bytes < one:
        raise CheckpointError(f"--kv-cache-bytes is too small for this model: one KV block takes {one} bytes")
    return settings.kv_cache_bytes // one
