"""Latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434): of a token one latent is kept, of which all heads
make their keys and values, and one rotated key that all share."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from llm_service.families.family import LayerKind
from llm_service.layers.attention.backend import AttentionBatch, AttentionKind
from llm_service.layers.attention.torch_backend import TorchBatch
from llm_service.layers.cache_spec import PagedKV
from llm_service.layers.group import TensorGroup
from llm_service.layers.latent_chunks import mix_chunks
from llm_service.layers.latent_products import LatentProducts
from llm_service.layers.linear import PackedLinear, length
from llm_service.layers.mixer import Rotary, StateBackend
from llm_service.layers.ops import TORCH, RMSNorm, RowOps
from llm_service.models.config import TextConfig

_EPS = 1e-6
"""Of norms of latents, whatever a configuration states for others."""


class LatentAttention(nn.Module):
    """The cache has one head: a key is a latent, and behind it the rotated numbers; its value is the latent. Queries
    are multiplied with the heads' matrices for keys before they meet it, and what comes out with those for values.

    Heads are split over ranks; latents are computed, and kept, by each. A head's rotated numbers lie before the plain
    ones here, since it is the first ones of a head that are rotated.
    """

    stored_as: ClassVar[str] = "self_attn"
    ops: RowOps = TORCH

    def __init__(self, kind: LayerKind, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.latent is not None, "the configuration has the heads' shape"
        self._group, self._shape, self._grows = group, config.latent, config.rotary.tempering is not None
        shape, own, whole = config.latent, group.share(config.heads), slice(0, config.hidden_size)
        self._kind = AttentionKind(kind.window, kind.spans, shape.scale, kind.whole_spans)
        self.heads = length(own)
        queries, latent = {"q_proj": _rows(own, shape.query)}, {"kv_a_proj_with_mqa": slice(0, shape.width)}
        order = rotated_first(self.heads, shape.plain, shape.rotated, neighbours=shape.neighbours)
        linear, norm = partial(PackedLinear, bias=False, dtype=dtype), partial(RMSNorm, eps=_EPS, dtype=dtype)
        self.q_norm: RMSNorm | None = None
        self.q: PackedLinear | None = None
        if shape.query_rank:
            self.q_norm = norm(shape.query_rank, stored_as="q_a_layernorm")
            self.q = linear(slice(0, shape.query_rank), {"q_b_proj": queries.pop("q_proj")}, order=order)
            queries, order = {"q_a_proj": slice(0, shape.query_rank)}, torch.arange(shape.query_rank)
        pairs = shape.rank + _pairs(shape.rotated, neighbours=shape.neighbours)
        order = torch.cat([order, len(order) + torch.cat([torch.arange(shape.rank), pairs])])
        self.down = linear(whole, queries | latent, order=order)
        self.kv_norm = norm(shape.rank, stored_as="kv_a_layernorm")
        self.products = LatentProducts(shape, config.heads, group, dtype)
        self.o = linear(_rows(own, shape.value), {"o_proj": whole})

    def cache_spec(self) -> PagedKV:
        """One head's keys."""
        return PagedKV(self.heads, 1, self._shape.width, self._kind, self._shape.rank)

    def state_backend(self) -> StateBackend:
        """There is no state."""
        raise NotImplementedError

    def project(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, ...]:
        """x [n, hidden] → this rank's queries [n, heads, rotated + plain], and what is kept [n, 1, rank + rotated]."""
        made, latent = self.down(x).split([self.down.outputs - self._shape.width, self._shape.width], dim=1)
        return self.queries(self.resid(made), rotary), self.key(latent, (rotary[0], rotary[1]))

    def resid(self, made: Tensor) -> Tensor:
        """What queries are made of, normed, [n, query_rank]; where that is the layer's input, queries themselves."""
        return made if self.q_norm is None else self.q_norm(made)

    def queries(self, resid: Tensor, rotary: Rotary) -> Tensor:
        """What `resid` gave → queries [n, heads, rotated + plain], which may grow with their places."""
        heads = (resid if self.q is None else self.q(resid)).view(len(resid), self.heads, self._shape.query)
        query = self.ops.qk_norm_rotary(heads, (rotary[0], rotary[1]), self.heads, 0, None, _EPS)
        return (query * rotary[2]).to(query.dtype) if self._grows else query

    def key(self, latent: Tensor, rotary: Rotary) -> Tensor:
        """What the input gives for a latent and a rotated key [n, rank + rotated] → what is kept, [n, 1, the same]."""
        rank = self._shape.rank
        rotated = self.ops.qk_norm_rotary(latent[:, rank:].unsqueeze(1), rotary, 1, 0, None, _EPS)
        return torch.cat([self.kv_norm(latent[:, :rank]).unsqueeze(1), rotated], dim=2)

    def mix(self, inputs: tuple[Tensor, ...], cache: Tensor, batch: AttentionBatch) -> Tensor:
        """See `MixerPart`: this rank's heads [n, heads · value]."""
        query, key = inputs
        if isinstance(batch, TorchBatch):
            keys, _ = batch.store(key, key[..., : self._shape.rank], cache)
            return mix_chunks(query, keys[:, 0], batch, self._shape, self.products)
        mixed = batch.attend(self.products.absorbed(query), key, key[..., : self._shape.rank], cache)
        return self.products.values(mixed.view(len(query), self.heads, self._shape.rank))

    def join(self, mixed: Tensor) -> Tensor:
        """All ranks' heads [n, heads · value] → [n, hidden]."""
        return self._group.sum(self.o(mixed))


def rotated_first(heads: int, plain: int, rotated: int, *, neighbours: bool) -> Tensor:
    """Where the rows of a projection go that has of each head the plain numbers before the rotated ones, so that these
    are the first.

    >>> rotated_first(2, 1, 4, neighbours=True).tolist()  # p a0 b0 a1 b1, and the other head → a0 a1 b0 b1 p, …
    [4, 0, 2, 1, 3, 9, 5, 7, 6, 8]
    """
    places = torch.cat([torch.arange(rotated, rotated + plain), _pairs(rotated, neighbours=neighbours)])
    return (torch.arange(heads).unsqueeze(1) * (plain + rotated) + places).flatten()


def _pairs(rotated: int, *, neighbours: bool) -> Tensor:
    """Where rotated numbers go, so that the first ones of their pairs come before the second ones."""
    places = torch.arange(rotated)
    return places.view(2, -1).t().flatten() if neighbours else places


def _rows(heads: slice, size: int) -> slice:
    """The rows of some heads, of so many numbers each."""
    return slice(heads.start * size, heads.stop * size)
