"""Marks around media with tables of their own, as in Gemma 3n."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from llm_service.layers.linear.parallel import VocabParallelEmbedding
from llm_service.layers.linear.placement import Place, Stored, fill
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.layer_shapes import MarkTable

PARTS = "embedding", "hard_embedding_norm", "embedding_projection"
"""The parts of such a table, in transformers' names."""


class _Marks(nn.Module):
    """The embeddings of one table's marks: norm(projection(norm(embedding))), computed when all of it is read."""

    def __init__(self, table: MarkTable, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.table, self._hidden = table, hidden
        self.rows = nn.Parameter(torch.empty(table.count, hidden, dtype=dtype), requires_grad=False)
        self._read: dict[str, Tensor] = {}

    def targets(self) -> dict[str, Place]:
        """See `Placed`."""
        width = self.table.width
        shapes = zip(PARTS, ((self.table.count, width), (width,), (self._hidden, width)), strict=True)
        return {f"{self.table.name}.{part}.weight": self._placed(part, shape) for part, shape in shapes}

    def _placed(self, part: str, shape: tuple[int, ...]) -> Place:
        def place(stored: Stored) -> None:
            read = torch.empty(shape, dtype=torch.float32)
            fill(read, stored[:])
            self._read[part] = read
            if len(self._read) == len(PARTS):
                self._make(*(self._read.pop(each) for each in PARTS))

        return place

    def _make(self, embedding: Tensor, gain: Tensor, projection: Tensor) -> None:
        eps = self.table.eps
        normed = functional.rms_norm(embedding, gain.shape, gain, eps)
        self.rows.copy_(functional.rms_norm(normed @ projection.T, (self._hidden,), eps=eps))

    def put(self, embedded: Tensor, token_ids: Tensor) -> Tensor:
        places = token_ids - self.table.first
        there = (places >= 0) & (places < self.table.count)
        own = functional.embedding(places.clamp(0, self.table.count - 1), self.rows)
        return torch.where(there.unsqueeze(1), own, embedded)


class MarkedEmbedding(VocabParallelEmbedding):
    """Token embeddings, some of which come from `tables`, which every rank has."""

    def __init__(
        self,
        tables: tuple[MarkTable, ...],
        total: int,
        hidden: int,
        group: TensorGroup,
        dtype: torch.dtype,
        **more: Any,
    ) -> None:
        super().__init__(total, hidden, group, dtype, **more)
        self.marks = nn.ModuleList(_Marks(table, hidden, dtype) for table in tables)

    def targets(self, own: str) -> dict[str, Place]:
        """See `Placed`."""
        found = super().targets(own)
        for marks in self.marks:
            assert isinstance(marks, _Marks), "there are no others"
            found |= marks.targets()
        return found

    def forward(self, token_ids: Tensor) -> Tensor:
        """int [n] → [n, hidden]."""
        embedded = super().forward(token_ids)
        for marks in self.marks:
            assert isinstance(marks, _Marks), "there are no others"
            embedded = marks.put(embedded, token_ids)
        return embedded
