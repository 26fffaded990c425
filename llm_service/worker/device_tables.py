"""Block tables on the device, for kernels; plans append to them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from llm_service.layers.attention.backend import PagedChunk
from llm_service.plan import Appended, Chunk
from llm_service.worker.block_tables import BlockTables


class DeviceTables:
    """The block tables of all running sequences, one row each, on the host and on the device. A step changes no more
    than what is appended, however long the tables are. Steps come in the order of their plans."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._size = block_size
        self._host = BlockTables()
        self._there = torch.zeros(0, 0, dtype=torch.int32, device=device)
        self._whole = self._behind = False

    @property
    def host(self) -> np.ndarray:
        """int32 [rows, width], as `BlockTables.numbers`."""
        return self._host.numbers

    def append(self, appended: Sequence[Appended]) -> list[np.ndarray]:
        """Appends a plan's blocks on the host. Returns what `update` needs on the device: everything, if the previous
        plan did not get that far."""
        self._whole = self._host.append(appended) or self._behind
        self._behind = True
        if self._whole:
            return [self.host]
        if not appended:
            return []
        width = self.host.shape[1]
        blocks = [np.frombuffer(each.blocks, np.int32) for each in appended]
        starts = (each.row * width + each.begin for each in appended)
        places = [np.arange(start, start + len(part)) for start, part in zip(starts, blocks, strict=True)]
        return [np.concatenate(places), np.concatenate(blocks)]

    def update(self, moved: Sequence[Tensor]) -> None:
        """Applies the last `append` on the device."""
        self._behind = False
        if self._whole:
            self._there = moved[0].clone()  # the rest of that copy is freed
        elif moved:
            places, blocks = moved
            self._there.view(-1).index_copy_(0, places, blocks)

    def gather(self, rows: Tensor, longest: int, out: Tensor | None = None) -> Tensor:
        """The tables in `rows` int [s], as wide as a sequence of `longest` tokens needs, int32 [s, w]; in the first
        columns of `out`, if given."""
        width = -(-longest // self._size)
        if out is None:
            return self._there[:, :width].index_select(0, rows)
        return torch.index_select(self._there[:, :width], 0, rows, out=out[:, :width])

    def chunks(self, chunks: Sequence[Chunk]) -> list[PagedChunk]:
        """A plan's, with their tables as they are on the host now."""
        size, host = self._size, self.host
        return [
            PagedChunk(
                each.context,
                each.count,
                host[each.row, : -(-(each.context + each.count) // size)],
                each.decodes,
                each.answers,
                each.answered,
            )
            for each in chunks
        ]
