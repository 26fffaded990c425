"""Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434): one latent per token is cached, from
which all heads make keys and values, and one rotated key that all share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn

from llm_service.families.family import LayerKind, OutputGate
from llm_service.layers.attention.backend import AttentionBatch, AttentionKind
from llm_service.layers.attention.torch_backend import TorchBatch
from llm_service.layers.cache_spec import IndexedKV, PagedKV
from llm_service.layers.elementwise import sigmoid
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.linear.placement import Place, Stored, fill, length
from llm_service.layers.mixer import Rotary, StateBackend
from llm_service.layers.mla.chunks import mix_chunks
from llm_service.layers.mla.up_projections import KvUpProjections
from llm_service.layers.norms import RMSNorm
from llm_service.layers.ops import TORCH, RowOps
from llm_service.layers.rotary.learned import LearnedGrowth
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.text import TextConfig


class SinksLatents(Protocol):
    """A batch over latents whose `attend` supports sinks, float32 [heads]."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, sinks: Tensor | None, /) -> Tensor: ...


class HeadSinks(nn.Module):
    """The sinks of these heads: scores without values, float32."""

    def __init__(self, heads: slice) -> None:
        super().__init__()
        self._own, count = heads, heads.stop - heads.start
        self.scores = nn.Parameter(torch.empty(count, dtype=torch.float32), requires_grad=False)

    def targets(self, own: str) -> dict[str, Place]:
        """See `Placed`."""
        return {own: self._place}

    def _place(self, stored: Stored) -> None:
        fill(self.scores, stored[self._own].float())


class LatentAttention(nn.Module):
    """The cache has one head: a key is a latent followed by the rotated numbers; its value is the latent. Queries are
    multiplied with the heads' key matrices before they meet it, and results with the value matrices.

    Heads are split over ranks; every rank computes and caches latents. A head's rotated numbers come before the plain
    ones here, since the first ones of a head are rotated. The family says whether each head has a gate on its output,
    or one for each number of it, and whether it has a sink. A layer that uses another layer's latents only makes
    queries.
    """

    stored_as: ClassVar[str] = "self_attn"
    ops: RowOps = TORCH

    def __init__(self, kind: LayerKind, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self._group, self.shape, self._grows = group, config.latent_heads(kind), config.rotary.tempering is not None
        heads, whole = config.heads_of(kind), slice(0, config.hidden_size)
        shape, own = self.shape, group.partition(heads)
        self._kind = AttentionKind(kind.sight, shape.scale)
        self.heads = length(own)
        self.growth = LearnedGrowth(own) if config.rotary.learned else None
        self._keys_of, self._made = kind.keys_of, shape.width if kind.keys_of is None else 0
        queries = {"q_proj": _rows(own, shape.query)}
        latent = {"kv_a_proj_with_mqa": slice(0, shape.width)} if self._made else {}
        order = rotated_first(self.heads, shape.plain, shape.rotated, neighbours=shape.neighbours)
        linear, norm = partial(PackedLinear, bias=False, dtype=dtype), partial(GrownNorm, eps=shape.eps, dtype=dtype)
        self.q_norm: GrownNorm | None = None
        self.q: PackedLinear | None = None
        if shape.query_rank:
            self.q_norm = norm(shape.query_rank, stored_as="q_a_layernorm", growth=shape.query_growth)
            self.q = linear(slice(0, shape.query_rank), {"q_b_proj": queries.pop("q_proj")}, order=order)
            queries, order = {"q_a_proj": slice(0, shape.query_rank)}, torch.arange(shape.query_rank)
        pairs = _pairs(shape.rotated, neighbours=shape.neighbours)
        of_latent = torch.cat([torch.arange(shape.rank), shape.rank + pairs])
        self.down = linear(whole, queries | latent, order=torch.cat([order, len(order) + of_latent[: self._made]]))
        self.kv_norm: GrownNorm | None = None
        self.rotated_norm: GrownNorm | None = None
        if self._made:
            self.kv_norm = norm(shape.rank, stored_as="kv_a_layernorm", growth=shape.growth)
        if self._made and shape.norms_rotated:
            self.rotated_norm = norm(shape.rotated, stored_as="k_rope_only_layernorm", order=pairs)
        self.products = KvUpProjections(shape, heads, group, dtype)
        self.head_gates: PackedLinear | None = None
        if config.family.attention.output_gate is OutputGate.PER_HEAD:  # few
            self.head_gates = linear(whole, {"g_proj": own}, rounds=False)
        elif config.family.attention.output_gate is not OutputGate.NONE:
            self.head_gates = linear(whole, {"gate_proj": _rows(own, shape.value)})
        self.sinks = HeadSinks(own) if config.family.attention.sinks else None
        self.o = linear(_rows(own, shape.value), {"o_proj": whole})

    @property
    def kept(self) -> PagedKV:
        """One head's keys."""
        return PagedKV(self.heads, 1, self.shape.width, self._kind, self.shape.rank)

    def cache_spec(self) -> PagedKV | IndexedKV:
        """What is cached of tokens."""
        return self.kept

    def state_backend(self) -> StateBackend:
        """There is no state."""
        raise NotImplementedError

    def project(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, ...]:
        """x [n, hidden] → this rank's queries [n, heads, rotated + plain], the cached latent [n, 1, rank + rotated],
        and gates [n, heads, 1 or value], if there are any."""
        made, latent = self.apart(x)
        return self.queries(self.resid(made), rotary), self.key(latent, (rotary[0], rotary[1])), *self.gates(x)

    def apart(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [n, hidden] → the inputs of `resid` and of `key`; the latter is empty if another layer has it."""
        made, latent = self.down(x).split([self.down.outputs - self._made, self._made], dim=1)
        return made, latent

    def gates(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [n, hidden] → this rank's heads' gates [n, heads, 1 or value], if there are any."""
        return () if self.head_gates is None else (self.head_gates(x).view(len(x), self.heads, -1),)

    @property
    def lost(self) -> Tensor | None:
        """The sinks' scores, float32 [heads]."""
        return None if self.sinks is None else self.sinks.scores

    def resid(self, made: Tensor) -> Tensor:
        """The normed latent of queries, [n, query_rank]; without one, the queries themselves."""
        return made if self.q_norm is None else self.q_norm(made)

    def queries(self, resid: Tensor, rotary: Rotary) -> Tensor:
        """The result of `resid` → queries [n, heads, rotated + plain], which may grow with their positions."""
        heads = (resid if self.q is None else self.q(resid)).view(len(resid), self.heads, self.shape.query)
        query = heads
        if self.shape.rotated:
            query = self.ops.qk_norm_rotary(heads, (rotary[0], rotary[1]), self.heads, 0, None, self.shape.eps)
        if self.growth is not None:
            query = self.growth(query, rotary[2])
        return (query * rotary[2]).to(query.dtype) if self._grows else query

    def key(self, latent: Tensor, rotary: Rotary) -> Tensor:
        """The projected latent and rotated key [n, rank + rotated] → the cached form, [n, 1, the same]."""
        assert self.kv_norm is not None, "the layer has latents of its own"
        rank, norm = self.shape.rank, self.rotated_norm
        normed: Tensor = self.kv_norm(latent[:, :rank]).unsqueeze(1)
        if not self.shape.rotated:
            return normed
        gains = None if norm is None else (norm.weight, norm.weight)
        rotated = self.ops.qk_norm_rotary(latent[:, rank:].unsqueeze(1), rotary, 1, 0, gains, self.shape.eps)
        return torch.cat([normed, rotated], dim=2)

    def mix(self, inputs: tuple[Tensor, ...], cache: Any, batch: Any) -> Tensor:
        """See `MixerPart`: this rank's heads [n, heads · value]."""
        query, key, *gates = inputs
        return self.opened(self.attended(query, key, cache, batch), gates)

    def opened(self, attended: Tensor, gates: Sequence[Tensor]) -> Tensor:
        """[n, heads · value], multiplied by the heads' gates, if there are any."""
        if not gates:
            return attended
        return (attended.view(len(attended), self.heads, -1) * sigmoid(gates[0])).flatten(1)

    def attended(self, query: Tensor, key: Tensor, cache: Tensor, batch: AttentionBatch) -> Tensor:
        """The result of `project` → [n, heads · value]; a layer's cache includes this batch's keys afterwards."""
        if isinstance(batch, TorchBatch):
            keys, _ = batch.store(key, key[..., : self.shape.rank], cache)
            return mix_chunks(query, keys[:, 0], batch, self.shape, self.products, self.lost)
        given = self.products.absorbed(query), key, key[..., : self.shape.rank], cache
        mixed = batch.attend(*given) if self.sinks is None else cast(SinksLatents, batch).attend(*given, self.lost)
        return self.products.values(mixed.view(len(query), self.heads, self.shape.rank))

    def join(self, mixed: Tensor) -> Tensor:
        """All ranks' heads [n, heads · value] → [n, hidden]."""
        return self._group.sum(self.o(mixed))


class GrownNorm(RMSNorm):
    """A norm whose output is multiplied by `growth`, through the weight, which is then float32; `order` int64 [size]
    says where each number of a checkpoint's goes."""

    def __init__(
        self,
        size: int,
        eps: float,
        dtype: torch.dtype,
        *,
        stored_as: str,
        growth: float = 1.0,
        order: Tensor | None = None,
    ) -> None:
        super().__init__(size, eps, dtype, long_gain=growth != 1, stored_as=stored_as)
        self._growth, self._order = growth, order

    def _place(self, stored: Stored) -> None:
        gain: Tensor = stored[:] if self._order is None else stored[:][self._order.argsort()]
        fill(self.weight, gain if self._growth == 1 else gain.float() * self._growth)


def rotated_first(heads: int, plain: int, rotated: int, *, neighbours: bool) -> Tensor:
    """Where the rows of a projection go that has of each head the plain numbers before the rotated ones, so that these
    are the first.

    >>> rotated_first(2, 1, 4, neighbours=True).tolist()  # p a0 b0 a1 b1, and the other head → a0 a1 b0 b1 p, …
    [4, 0, 2, 1, 3, 9, 5, 7, 6, 8]
    """
    places = torch.cat([torch.arange(rotated, rotated + plain), _pairs(rotated, neighbours=neighbours)])
    return (torch.arange(heads).unsqueeze(1) * (plain + rotated) + places).flatten()


def _pairs(rotated: int, *, neighbours: bool) -> Tensor:
    """The order of rotated numbers in which the first ones of all pairs precede the second ones."""
    places = torch.arange(rotated)
    return places.view(2, -1).t().flatten() if neighbours and rotated else places


def _rows(heads: slice, size: int) -> slice:
    """The rows of some heads, with so many numbers each."""
    return slice(heads.start * size, heads.stop * size)
