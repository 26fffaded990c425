"""Places of tokens in their sequences, each with numbers that were learned, as in OPT."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

_BEFORE = 2
"""Rows of a table that are no place's."""


class PositionEmbedding(nn.Module):
    """Learned embeddings of `places` positions, added to the embeddings of tokens and items."""

    def __init__(self, places: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(places + _BEFORE, hidden, dtype=dtype), requires_grad=False)

    def forward(self, places: Tensor) -> Tensor:
        """int [n] → [n, hidden]."""
        return functional.embedding(places + _BEFORE, self.weight)
