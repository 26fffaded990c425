"""How many KV blocks fit in this rank's memory, measured by running the largest possible step.

The cache may take what is free after that step, less what the step needed while it ran: no formula for activations, and
no surprise under load.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch

from common.checkpoints.checkpoint import CheckpointError
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.settings import EngineSettings

_GPU_SHARE, _CPU_SHARE = 0.9, 0.4
"""Of the free memory, unless the options say otherwise: a CPU's is shared with the encoder and with everyone else."""
_SNAPSHOTS = 16
"""Most snapshots for each sequence that may run: tiny models would otherwise have more than can be searched."""
_CGROUP = Path("/sys/fs/cgroup")
_FILE_BLOCK = 512
"""Bytes that stat counts the memory of a file in."""


class Gauge:
    """Watches a device's memory while the largest step runs."""

    def __init__(self, device: torch.device, ranks_here: int) -> None:
        self._device = device
        self._ranks_here = ranks_here
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def free(self) -> int:
        """Bytes that a cache could take while the step runs again; ranks share their host's memory."""
        if self._device.type == "cuda":
            return _free_of_gpu(self._device)
        page = resource.getpagesize()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
        needed = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - resident
        return max(0, available_memory() // self._ranks_here - max(0, needed))


def _free_of_gpu(device: torch.device) -> int:
    needed = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, int(free) - int(needed))


def available_memory(proc: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Bytes that this process may still take: of the machine, or within its control group's limit."""
    fields = dict(line.split(":") for line in proc.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    return available if limit is None or used is None else min(available, max(0, limit - used))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no control group, or no limit ("max")
        return None


def cache_budget(settings: EngineSettings, free: int, *, gpu: bool) -> int:
    """Bytes for all that this rank keeps of sequences, if so many are free."""
    share = settings.kv_memory_share or (_GPU_SHARE if gpu else _CPU_SHARE)
    if not gpu:
        free -= _host_bytes_to_come(settings)  # it is the same memory
    return settings.kv_cache_bytes or int(share * max(0, free))


def _host_bytes_to_come(settings: EngineSettings) -> int:
    """Bytes that this rank's host blocks have yet to take: the front may have allocated some or all of a shared memory
    already."""
    if not settings.kv_host_fd:
        return settings.kv_host_bytes
    taken = os.fstat(settings.kv_host_fd).st_blocks * _FILE_BLOCK
    return max(0, settings.kv_host_bytes - taken // settings.tensor_parallel)


def slot_count(settings: EngineSettings, slot_bytes: int, budget: int, group: TensorGroup) -> int:
    """State slots that every rank can hold: one for each sequence that may run, but in at most half of the smallest
    budget, since sequences need blocks as well; 0 if no layer has states.

    Raises CheckpointError if there is no room for one.
    """
    if not slot_bytes:
        return 0
    slots = group.all_reduce_min(min(settings.max_running, budget // 2 // slot_bytes))
    if not slots:
        option = "--kv-cache-bytes is too small" if settings.kv_cache_bytes else "too little memory is free"
        raise CheckpointError(f"{option} for this model: the state of one sequence takes {slot_bytes} bytes")
    return slots


def snapshot_count(settings: EngineSettings, slot_bytes: int, budget: int, group: TensorGroup) -> int:
    """Slots that every rank can hold for snapshots and for states from before drafts: their share of what sequences'
    states leave of the smallest budget, and no more than can be useful; 0 if no layer has states, or there is neither
    caching nor drafting."""
    useful = _SNAPSHOTS if settings.prefix_cache else int(settings.speculative_tokens > 0)
    if not slot_bytes or not useful:
        return 0
    found = int(settings.snapshot_share * budget) // slot_bytes
    return group.all_reduce_min(min(found, useful * settings.max_running))


def host_block_count(settings: EngineSettings, block_bytes: int, slot_bytes: int, group: TensorGroup) -> int:
    """KV blocks in host memory for every rank; 0 if not configured.

    Raises CheckpointError if there is no room for one, or layers have states (of `slot_bytes`).
    """
    if not settings.kv_host_bytes:
        return 0
    if slot_bytes:
        raise CheckpointError(
            "--kv-host-bytes is not for a model whose layers keep states: blocks are useless without them"
        )
    count = group.all_reduce_min(settings.kv_host_bytes // block_bytes)
    if not count:
        raise CheckpointError(f"--kv-host-bytes is too small for this model: one KV block takes {block_bytes} bytes")
    return count


def block_count(settings: EngineSettings, block_bytes: int, budget: int, context: int, group: TensorGroup) -> int:
    """KV blocks that every rank can hold: the least over the ranks, each from its own `budget` in bytes.

    At most as many as the longest contexts of all sequences that may run at once. Raises CheckpointError if there is no
    room for one block.
    """
    wanted = settings.max_running * -(-context // settings.block_size)
    found = budget // block_bytes if settings.kv_cache_bytes else min(budget // block_bytes, wanted)
    blocks = group.all_reduce_min(found)
    if not blocks:
        option = "--kv-cache-bytes is too small" if settings.kv_cache_bytes else "too little memory is free"
        raise CheckpointError(f"{option} for this model: one KV block takes {block_bytes} bytes")
    return blocks
