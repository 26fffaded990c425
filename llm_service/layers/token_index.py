"""An index of single tokens (DeepSeek-V3.2): what it makes of them."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from llm_service.layers.index_keys import IndexQuery, TokenIndex
from llm_service.layers.linear import PackedLinear, Place, Stored, fill
from llm_service.layers.mixer import Rotary
from llm_service.layers.ops import TORCH, RowOps
from llm_service.models.config import TextConfig

_EPS = 1e-6
"""Of the norm of keys, whatever a configuration states for others."""


class TokenIndexer(nn.Module):
    """Makes an index's queries, of the latents that a layer's own queries are made of, and of each token one key and
    how much each head counts for it; every rank has all of them. The first numbers of a head are rotated, as many as
    of the layer's own."""

    stored_as: ClassVar[str] = "indexer"
    ops: RowOps = TORCH

    def __init__(self, config: TextConfig, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.token_index is not None, "a layer of this kind needs it"
        assert config.latent is not None, "its queries are made of latents"
        self.shape, latent = config.token_index, config.latent
        dim, heads, whole = self.shape.head_dim, self.shape.heads, slice(0, config.hidden_size)
        order = torch.arange(dim)
        if latent.neighbours:
            order[: latent.rotated] = order[: latent.rotated].view(2, -1).t().flatten()
        all_heads = (torch.arange(heads).unsqueeze(1) * dim + order).flatten()
        self.queries = PackedLinear(
            slice(0, latent.query_rank),
            {"wq_b": slice(0, heads * dim)},
            bias=False,
            dtype=dtype,
            order=all_heads,
            rounds=False,
        )
        self.keys = PackedLinear(whole, {"wk": slice(0, dim)}, bias=False, dtype=dtype, order=order, rounds=False)
        self.weights = PackedLinear(whole, {"weights_proj": slice(0, heads)}, bias=False, dtype=dtype, rounds=False)
        self.k_norm = OrderedLayerNorm(order, _EPS, dtype)

    def ask(self, x: Tensor, resid: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """x [n, hidden] and what queries are made of [n, query_rank] → queries [n, heads, head_dim], how much each
        counts, float32 [n, heads], and keys [n, head_dim]."""
        heads, dim = self.shape.heads, self.shape.head_dim
        queries = self.queries(resid).view(len(x), heads, dim)
        keys = self.k_norm(self.keys(x)).unsqueeze(1)
        angles = rotary[0], rotary[1]
        asked = self.ops.qk_norm_rotary(queries, angles, heads, 0, None, _EPS)
        kept = self.ops.qk_norm_rotary(keys, angles, 1, 0, None, _EPS).squeeze(1)
        return asked, self.weights(x).float() * heads**-0.5, kept

    def query(self, asked: Tensor, weights: Tensor, kept: Tensor) -> IndexQuery:
        """What `ask` gave, as it is chosen by."""
        return IndexQuery(TokenIndex(self.shape.most), asked, weights, kept, self.shape.head_dim**-0.5)


class OrderedLayerNorm(nn.Module):
    """LayerNorm (Ba, Kiros and Hinton 2016) of numbers that go to the places `order` int64 [size] as they are read."""

    def __init__(self, order: Tensor, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self._order, self._eps = order, eps
        self.weight, self.bias = (
            nn.Parameter(torch.empty(len(order), dtype=dtype), requires_grad=False) for _ in range(2)
        )

    def targets(self, own: str) -> dict[str, Place]:
        """See `Placed`."""
        return {f"{own}.weight": self._place_weight, f"{own}.bias": self._place_bias}

    def _place_weight(self, stored: Stored) -> None:
        fill(self.weight, stored[:][self._order.argsort()])

    def _place_bias(self, stored: Stored) -> None:
        fill(self.bias, stored[:][self._order.argsort()])

    def forward(self, x: Tensor) -> Tensor:
        """[n, size] → the same."""
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self._eps)
