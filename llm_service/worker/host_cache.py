"""Host memory for KV blocks evicted from a rank's device; `engine/host_blocks` decides what is where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from common.gpu.transfer import to_device
from llm_service.worker.row_arena import PinnedCopies

_AT_ONCE = 32 << 20
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""The types that bytes are moved as: the widest that divides them, since torch copies number by number."""


class HostCache:
    """Places for `count` blocks. `caches` are all tensors with a part of each block, [parts, blocks + 1, …]; a place
    has these parts one after the other.

    Copies are made in the order of the device's work, so a step never reads or writes blocks during them. A device
    `gathers` up to `at_once` bytes of blocks before they cross the bus, or scatters them after it: by default all
    devices but CPUs. The places are in `memory`, one after the other, if that is given: the front shares it. There each
    takes `place_bytes`, at least as many as a block has here, since another rank's may have more.
    """

    def __init__(
        self,
        caches: Sequence[Tensor],
        count: int,
        *,
        memory: memoryview | None = None,
        place_bytes: int = 0,
        gathers: bool | None = None,
        at_once: int = _AT_ONCE,
    ) -> None:
        self.count = count
        self._device = caches[0].device
        parts = [cache.flatten(2).view(torch.uint8) for cache in caches]
        sizes = [place_bytes, *(part.shape[2] for part in parts)]
        word = next(each for each in _WORDS if all(size % each.itemsize == 0 for size in sizes))
        self._parts = [part.view(word) for part in parts]
        self._sizes = [part.shape[0] * part.shape[2] for part in self._parts]
        own = sum(self._sizes)
        self.place_bytes = max(place_bytes, own * word.itemsize)
        if memory is None:
            whole = torch.empty(count, self.place_bytes, dtype=torch.uint8)
        else:
            whole = torch.frombuffer(memory[: count * self.place_bytes], dtype=torch.uint8)
        self._memory = whole.view(word).view(count, -1)[:, :own]
        self._most = max(1, at_once // self.place_bytes)
        on_cpu = self._device.type == "cpu"
        self._gathers = not on_cpu if gathers is None else gathers
        self._pinned = PinnedCopies(whole) if not on_cpu and count else None

    def offload(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks to places of the host, (block, place) each, in this order."""
        if not self._gathers:
            for block, place in pairs:
                for part, there in self._both(block, place):
                    np.copyto(there, part)
            return
        for some in self._groups(pairs):
            (blocks,) = to_device([np.array([block for block, _ in some])], self._device)
            gathered = torch.cat([_of(part, blocks) for part in self._parts], 1)
            for row, (_, place) in enumerate(some):
                self._memory[place].copy_(gathered[row], non_blocking=True)

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies places of the host to blocks, (place, block) each; no block comes twice."""
        if not self._gathers:
            for place, block in pairs:
                for part, there in self._both(block, place):
                    np.copyto(part, there)
            return
        for some in self._groups(pairs):
            gathered = torch.empty(len(some), sum(self._sizes), dtype=self._memory.dtype, device=self._device)
            for row, (place, _) in enumerate(some):
                gathered[row].copy_(self._memory[place], non_blocking=True)
            (blocks,) = to_device([np.array([block for _, block in some])], self._device)
            for cache, data in zip(self._parts, gathered.split(self._sizes, 1), strict=True):
                cache.index_copy_(1, blocks, data.view(len(some), cache.shape[0], -1).transpose(0, 1))

    def synchronize(self) -> None:
        """Waits until the device has made the copies."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _both(self, block: int, place: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Each part of a block, and its place on the host. Uses numpy: for so little, torch's threads would wait for
        each other longer than the copy takes."""
        for part, there in zip(self._parts, self._memory[place].split(self._sizes), strict=True):
            yield part[:, block].numpy(), there.view(part.shape[0], -1).numpy()

    def _groups(self, pairs: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        each = iter(pairs)
        while some := list(islice(each, self._most)):
            yield some


def _of(part: Tensor, blocks: Tensor) -> Tensor:
    """[n, words of a block]"""
    return part.index_select(1, blocks).transpose(0, 1).flatten(1)
