"""A decoder layer: pre-norm attention and a gated feed-forward part, dense or a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from llm_service.families.family import FeedForward, LayerKind, Mixer
from llm_service.layers.attention.backend import AttentionBatch
from llm_service.layers.attention.cache_spec import CacheSpec, PagedKV
from llm_service.layers.experts import SparseMLP
from llm_service.layers.group import TensorGroup
from llm_service.layers.linear import PackedLinear, length
from llm_service.layers.ops import TORCH, RMSNorm, RowOps
from llm_service.models.config import TextConfig


class Attention(nn.Module):
    """Grouped-query attention; its family says whether its inputs have biases, and query and key heads norms."""

    ops: RowOps = TORCH

    def __init__(self, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self._group = group
        bias, qk_norm = config.family.attention_bias, config.family.qk_norm
        self.head_dim, self.eps = config.head_dim, config.norm_eps
        own, shared = group.share(config.heads), group.kv_share(config.kv_heads)
        self.heads, self.kv_heads = length(own), length(shared)
        query, key = _elements(own, self.head_dim), _elements(shared, self.head_dim)
        whole = slice(0, config.hidden_size)
        self.qkv = PackedLinear(whole, {"q_proj": query, "k_proj": key, "v_proj": key}, bias=bias, dtype=dtype)
        self.o = PackedLinear(query, {"o_proj": whole}, bias=False, dtype=dtype)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps, dtype) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps, dtype) if qk_norm else nn.Identity()

    def project(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x [n, hidden] → this rank's queries [n, heads, head_dim], keys and values [n, kv_heads, head_dim]."""
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        rotated = self.ops.qk_norm_rotary(heads, rotary, self.heads, self.kv_heads, self.gains, self.eps)
        query, key = rotated.split([self.heads, self.kv_heads], dim=1)
        return query, key, heads[:, self.heads + self.kv_heads :]

    @property
    def gains(self) -> tuple[Tensor, Tensor] | None:
        """The weights, [head_dim] each, of the norms of queries and of keys; None where these are not normed."""
        if isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            return self.q_norm.weight, self.k_norm.weight
        return None

    def join(self, attended: Tensor) -> Tensor:
        """All ranks' heads [n, heads · head_dim] → [n, hidden]."""
        return self._group.sum(self.o(attended))


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    ops: RowOps = TORCH

    def __init__(self, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self._group = group
        inner, whole = group.share(config.intermediate_size), slice(0, config.hidden_size)
        self.gate_up = PackedLinear(whole, {"gate_proj": inner, "up_proj": inner}, bias=False, dtype=dtype)
        self.down = PackedLinear(inner, {"down_proj": whole}, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[n, hidden] → [n, hidden]."""
        return self._group.sum(self.down(self.ops.silu_and_mul(self.gate_up(x))))


def _experts(config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> SparseMLP:
    count, per_token = config.experts, config.experts_per_token
    return SparseMLP(count, per_token, config.hidden_size, config.expert_size, group, dtype)


MIXERS = {Mixer.ATTENTION: Attention}
FEED_FORWARDS: dict[FeedForward, Callable[[TextConfig, TensorGroup, torch.dtype], nn.Module]] = {
    FeedForward.DENSE: MLP,
    FeedForward.EXPERTS: _experts,
}


class DecoderLayer(nn.Module):
    """One decoder layer, made of what its kind says."""

    def __init__(self, kind: LayerKind, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.self_attn = MIXERS[kind.mixer](config, group, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.mlp = FEED_FORWARDS[kind.feed_forward](config, group, dtype)
        self.ranks = group.size

    def cache_spec(self) -> CacheSpec:
        """What it keeps of sequences."""
        return PagedKV(self.self_attn.heads, self.self_attn.kv_heads, self.self_attn.head_dim)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: Tensor,
        batch: AttentionBatch,
        places: Tensor | None = None,
    ) -> Tensor:
        """[n, hidden] → [n, hidden]; with `places` int64 [m], what follows attention is computed for those alone."""
        attended = batch.attend(*self.before(x, rotary), cache)
        if places is not None:
            x, attended = x[places], attended[places]
        return self.after(x, attended)

    def before(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """[n, hidden] → queries, keys and values."""
        return self.self_attn.project(self.input_layernorm(x), rotary)

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        """[n, hidden], and this rank's heads [n, heads · head_dim] → [n, hidden]."""
        x = x + self.self_attn.join(attended)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def _elements(heads: slice, head_dim: int) -> slice:
    """The rows of a projection that belong to some heads."""
    return slice(heads.start * head_dim, heads.stop * head_dim)
