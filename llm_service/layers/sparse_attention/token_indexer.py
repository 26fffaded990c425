"""The lightning indexer of DeepSeek Sparse Attention (DeepSeek-V3.2): an index of single tokens, and its batches."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from llm_service.families.family import LayerKind
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.linear.placement import Place, Stored, fill
from llm_service.layers.mixer import Rotary
from llm_service.layers.ops import TORCH, RowOps
from llm_service.layers.rotary.learned import LearnedGrowth
from llm_service.layers.sparse_attention.chosen_chunks import ChosenBatch
from llm_service.layers.sparse_attention.index import IndexQuery, TokenIndex
from llm_service.layers.sparse_attention.token_decodes import TokenDecodes
from llm_service.model_config.text import TextConfig


class TokenIndexer(nn.Module):
    """Makes an index's queries, from the latents of the layer's own queries or, without these, from its normed input;
    and for each token one key and the weight of each head. Every rank has all of them. The first numbers of a head are
    rotated, or in some families the last, as many as in the layer's own heads, and queries grow with their positions
    likewise."""

    stored_as: ClassVar[str] = "indexer"
    ops: RowOps = TORCH

    def __init__(self, kind: LayerKind, config: TextConfig, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.token_index is not None, "a layer of this kind needs it"
        self.shape, latent = config.token_index, config.latent_heads(kind)
        self._rotated = latent.rotated > 0
        dim, heads, whole = self.shape.head_dim, self.shape.heads, slice(0, config.hidden_size)
        eps = self._eps = config.norm_eps if config.family.indexer.norm_eps is None else config.family.indexer.norm_eps
        order = torch.arange(dim)
        if latent.neighbours and self._rotated:
            order[: latent.rotated] = order[: latent.rotated].view(2, -1).t().flatten()
        if config.family.indexer.rope_last:
            order = order.roll(dim - latent.rotated)
        all_heads = (torch.arange(heads).unsqueeze(1) * dim + order).flatten()
        self.queries = PackedLinear(
            slice(0, latent.query_rank) if latent.query_rank else whole,
            {"wq_b": slice(0, heads * dim)},
            bias=False,
            dtype=dtype,
            order=all_heads,
            rounds=False,
        )
        self.keys = PackedLinear(whole, {"wk": slice(0, dim)}, bias=False, dtype=dtype, order=order, rounds=False)
        self.weights = PackedLinear(whole, {"weights_proj": slice(0, heads)}, bias=False, dtype=dtype, rounds=False)
        self.k_norm = OrderedLayerNorm(order, eps, dtype)
        self.q_input_norm: OrderedLayerNorm | None = None
        if not latent.query_rank:
            self.q_input_norm = OrderedLayerNorm(torch.arange(config.hidden_size), eps, dtype)
        self.growth = LearnedGrowth(slice(0, heads)) if config.rotary.learned else None

    @property
    def kept_width(self) -> int:
        """Numbers that are kept of a token."""
        return self.shape.head_dim

    def keep(self, kept: Tensor, cache: Tensor, batch: ChosenBatch | TokenDecodes) -> None:
        """Writes what is kept of a batch's tokens, [n, kept_width], into one layer's cache [blocks + 1, block_size,
        kept_width]."""
        batch.keep(kept, cache)

    def ask(self, x: Tensor, resid: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """x [n, hidden] and, if a layer's queries come from latents, these [n, query_rank] → queries [n, heads,
        head_dim], the weight of each, float32 [n, heads], and keys [n, head_dim]."""
        heads, dim = self.shape.heads, self.shape.head_dim
        asked = self.queries(resid if self.q_input_norm is None else self.q_input_norm(x)).view(len(x), heads, dim)
        kept = self.k_norm(self.keys(x)).unsqueeze(1)
        if self._rotated:
            angles = rotary[0], rotary[1]
            asked = self.ops.qk_norm_rotary(asked, angles, heads, 0, None, self._eps)
            kept = self.ops.qk_norm_rotary(kept, angles, 1, 0, None, self._eps)
        if self.growth is not None:
            asked = self.growth(asked, rotary[2])
        return asked, self.weights(x).float() * heads**-0.5, kept.squeeze(1)

    def query(self, asked: Tensor, weights: Tensor, kept: Tensor) -> IndexQuery:
        """The result of `ask`, in the form of a query to the index."""
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
