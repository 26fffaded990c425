"""The host's memory for KV blocks that a rank's device has no room for; `engine/host_blocks` says what is where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from llm_service.layers.transfer import to_device
from llm_service.worker.row_arena import PinnedCopies

_AT_ONCE = 32 << 20


class HostCache:
    """Places for `count` blocks. `caches` are all tensors that have a part of each block, [parts, blocks + 1, …], where
    a place has one after the other; `at_once` bytes of them are gathered on the device at a time.

    Copies are made in the order of the device's work: a step reads and writes blocks before or after, never meanwhile.
    """

    def __init__(self, caches: Sequence[Tensor], count: int, *, at_once: int = _AT_ONCE) -> None:
        self.count = count
        self._parts = [cache.flatten(2).view(torch.uint8) for cache in caches]
        self._sizes = [part.shape[0] * part.shape[2] for part in self._parts]
        self._device = caches[0].device
        self._memory = torch.empty(count, sum(self._sizes), dtype=torch.uint8)
        self._most = max(1, at_once // sum(self._sizes))
        self._pinned = PinnedCopies(self._memory) if self._device.type == "cuda" and count else None

    def offload(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks to places of the host, (block, place) each, in this order."""
        for some in self._groups(pairs):
            (blocks,) = to_device([np.array([block for block, _ in some])], self._device)
            gathered = torch.cat([_of(part, blocks) for part in self._parts], 1)
            for row, (_, place) in enumerate(some):
                self._memory[place].copy_(gathered[row], non_blocking=True)

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies places of the host to blocks, (place, block) each; no block comes twice."""
        for some in self._groups(pairs):
            gathered = torch.empty(len(some), sum(self._sizes), dtype=torch.uint8, device=self._device)
            for row, (place, _) in enumerate(some):
                gathered[row].copy_(self._memory[place], non_blocking=True)
            (blocks,) = to_device([np.array([block for _, block in some])], self._device)
            for part, data in zip(self._parts, gathered.split(self._sizes, 1), strict=True):
                part.index_copy_(1, blocks, data.view(len(some), part.shape[0], -1).transpose(0, 1))

    def _groups(self, pairs: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        each = iter(pairs)
        while some := list(islice(each, self._most)):
            yield some


def _of(part: Tensor, blocks: Tensor) -> Tensor:
    """uint8 [n, bytes of a block]"""
    return part.index_select(1, blocks).transpose(0, 1).flatten(1)
