"""Self-attention over the paged cache: its projections, and its weights in a checkpoint."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from llm_service.families.family import LayerKind, OutputGate
from llm_service.layers.attention.backend import AttentionBatch, AttentionKind
from llm_service.layers.cache_spec import IndexedKV, PagedKV, SharedKV
from llm_service.layers.elementwise import sigmoid
from llm_service.layers.linear.parallel import PackedLinear, RowParallelLinear
from llm_service.layers.linear.placement import length
from llm_service.layers.mixer import Rotary, StateBackend
from llm_service.layers.norms import PlainNorm, RMSNorm
from llm_service.layers.ops import TORCH, RowOps
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.text import TextConfig


class SelfAttention(nn.Module):
    """Grouped-query attention. The family says whether projections have biases, query and key heads norms, values a
    norm without weight, and the output a gate; the layer's kind says what a token sees. A layer that uses another
    layer's keys and values only projects queries."""

    stored_as: ClassVar[str] = "self_attn"
    ops: RowOps = TORCH
    kv_scales: Tensor | None = None
    """The factors of e4m3 numbers in the cache, of this rank's heads of keys and of values, float32 [2, kv_heads];
    None: 1."""

    def __init__(self, kind: LayerKind, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self._group = group
        family = config.family
        self._kind = AttentionKind(kind.sight, config.attention_scale, config.attention_cap)
        self._keys_of = kind.keys_of
        shape = config.head_shape(kind)
        self.head_dim, self.eps, self._keys_as_values = shape.head_dim, config.norm_eps, shape.keys_as_values
        shared, own = group.kv_partition(shape.kv_heads), group.partition(config.heads_of(kind))
        self.heads, self.kv_heads, gate = length(own), length(shared), family.attention.output_gate
        self.has_gates, self._fuses_gates = gate in (OutputGate.FUSED, OutputGate.SEPARATE), gate is OutputGate.FUSED
        self.all_kv_heads, self.kv_partition = shape.kv_heads, shared
        self.new_keys = self.kv_heads if kind.keys_of is None else 0
        query, key = _elements(own, self.head_dim), _elements(shared, self.head_dim)
        whole, inputs = slice(0, config.hidden_size), self._inputs(config)
        parts = {"q_proj": _elements(own, 2 * self.head_dim) if self._fuses_gates else query}
        if self.new_keys:
            parts |= {"k_proj": key} if self._keys_as_values else {"k_proj": key, "v_proj": key}
        if gate is OutputGate.SEPARATE:
            parts |= {"gate_proj": query}
        stacked: dict[str, slice | tuple[slice, ...]] = {**parts}
        if family.attention.fused_qkv:
            keys, values = (config.heads_of(kind) + n * shape.kv_heads for n in range(2))
            behind = (_elements(shared, self.head_dim, first) for first in (keys, values))
            stacked = {"qkv_proj": (query, *behind)}
        bias, order = family.attention.bias, self._order(config)
        self.qkv = PackedLinear(inputs, stacked, bias=bias, dtype=dtype, order=order)
        self.o = RowParallelLinear(query, {"o_proj": whole}, group, bias=family.layers.output_biases, dtype=dtype)
        self.head_gates: PackedLinear | None = None
        if gate is OutputGate.PER_HEAD:  # few
            self.head_gates = PackedLinear(inputs, {"g_proj": own}, bias=False, dtype=dtype, rounds=False)

        rule = family.attention.qk_norm
        kept = PlainNorm if rule is not None and not rule.weights else RMSNorm
        norm, normed = partial(kept.of, config, self.head_dim, dtype), config.norms_heads(kind)
        self.q_norm: nn.Module = norm() if normed else nn.Identity()
        self.k_norm: nn.Module = norm() if normed and self.new_keys else nn.Identity()
        self._value_gain: Tensor | None
        gain = torch.ones(self.head_dim, dtype=dtype) if family.attention.value_norm and self.new_keys else None
        self.register_buffer("_value_gain", gain, persistent=False)

    def _inputs(self, config: TextConfig) -> slice:
        """The numbers that it projects."""
        return slice(0, config.hidden_size)

    def _order(self, config: TextConfig) -> Tensor | None:
        """Where the rows of a checkpoint's projections go, unless they are in order."""
        if self._fuses_gates:
            return gates_last(self.heads, self.kv_heads, self.head_dim)
        if config.family.rope.interleaved:
            return pairs_apart(self.heads + self.kv_heads, self.kv_heads, self.head_dim, config.rotary.dim)
        return None

    def cache_spec(self) -> PagedKV | IndexedKV | SharedKV:
        """Keys and values, or whose."""
        if self._keys_of is not None:
            return SharedKV(self._keys_of)
        return PagedKV(self.heads, self.kv_heads, self.head_dim, self._kind)

    def state_backend(self) -> StateBackend:
        """There is no state."""
        raise NotImplementedError

    def project(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, ...]:
        """x [n, hidden] → this rank's queries [n, heads, head_dim], keys and values [n, kv_heads, head_dim], unless
        they are another layer's, and gates [n, heads, head_dim], if there are any."""
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        rotated = self.ops.qk_norm_rotary(heads, rotary, self.heads, self.new_keys, self.gains, self.eps)
        parts = self.parts(rotated, heads)
        if self.head_gates is None:
            return parts
        return *parts, self.head_gates(x).unsqueeze(2).expand(-1, -1, self.head_dim)

    def parts(self, rotated: Tensor, heads: Tensor) -> tuple[Tensor, ...]:
        """The inputs of `mix`, from rotated queries and keys [n, heads + new_keys, head_dim], and all projected heads,
        one after the other."""
        if not self.new_keys:
            return (rotated,)
        query, key = rotated.split([self.heads, self.kv_heads], dim=1)
        first = self.heads if self._keys_as_values else self.heads + self.kv_heads
        value = heads[:, first : first + self.kv_heads]
        if self._value_gain is not None:
            normed = self.ops.rms_norm(value.reshape(-1, self.head_dim), self._value_gain, self.eps)
            value = normed.view(value.shape)
        return (query, key, value, heads[:, first + self.kv_heads :]) if self.has_gates else (query, key, value)

    @property
    def gains(self) -> tuple[Tensor, Tensor] | None:
        """The weights of the norms of queries and keys, [head_dim] each; None if they have no norms."""
        if not isinstance(self.q_norm, RMSNorm):
            return None
        return self.q_norm.weight, (self.k_norm if isinstance(self.k_norm, RMSNorm) else self.q_norm).weight

    def mix(self, inputs: tuple[Tensor, ...], cache: Tensor, batch: AttentionBatch) -> Tensor:
        """See `MixerPart`: this rank's heads [n, heads · head_dim]."""
        query, key, value, *gates = inputs
        attended = batch.attend(query, key, value, cache)
        return attended * sigmoid(gates[0].flatten(1)) if gates else attended

    def join(self, mixed: Tensor) -> Tensor:
        """All ranks' heads [n, heads · head_dim] → [n, hidden]."""
        return self._group.sum(self.o(mixed))


def gates_last(heads: int, kv_heads: int, head_dim: int) -> Tensor:
    """Where rows go that are kept as query and gate of each head in turn, then keys, then values, so that queries,
    keys, values and gates lie one after the other.

    >>> gates_last(2, 1, 1).tolist()  # q0 g0 q1 g1 k v → q0 q1 k v g0 g1
    [0, 4, 1, 5, 2, 3]
    """
    first = heads + 2 * kv_heads
    turns = [place for head in range(heads) for place in (head, first + head)]
    places = torch.tensor([*turns, *range(heads, first)]).unsqueeze(1) * head_dim
    return (places + torch.arange(head_dim)).flatten()


def pairs_apart(rotated: int, kv_heads: int, head_dim: int, rotary_dim: int) -> Tensor:
    """Where rows go of so many heads that are rotated, whose pairs are neighbours, and of values, so that the first
    numbers of a head's pairs come before the second ones.

    >>> pairs_apart(1, 1, 6, 4).tolist()  # a0 b0 a1 b1 c d, and values → a0 a1 b0 b1 c d, and values
    [0, 2, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    """
    places = torch.arange(head_dim)
    places[:rotary_dim] = torch.arange(rotary_dim).view(2, -1).t().flatten()
    first = torch.arange(rotated).unsqueeze(1) * head_dim
    values = torch.arange(rotated * head_dim, (rotated + kv_heads) * head_dim)
    return torch.cat([(first + places).flatten(), values])


def _elements(heads: slice, head_dim: int, first: int = 0) -> slice:
    """The rows of a projection that belong to some heads, counted from head `first`."""
    return slice((first + heads.start) * head_dim, (first + heads.stop) * head_dim)
