"""Norms of heads in unusual places: with weights for each head (Chameleon), after rotation (HunyuanOCR), or on the
output, before its gate (Muse Spark)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from llm_service.families.family import LayerKind
from llm_service.layers.attention.backend import AttentionBatch
from llm_service.layers.elementwise import sigmoid
from llm_service.layers.linear.placement import Place, Stored, fill, length
from llm_service.layers.mixer import Rotary
from llm_service.layers.norms import RMSNorm
from llm_service.layers.self_attention.layer import SelfAttention
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.text import TextConfig

_EPS = 1e-5


class HeadNorms(nn.Module):
    """(x - mean(x)) / deviation(x) · weight + bias of each head's numbers, each head with its own weight and bias. Of a
    checkpoint's, [heads, head_dim] each, this has the heads of a rank."""

    def __init__(self, own: slice, head_dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._own = own
        shape = length(own), head_dim
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)

    def targets(self, own: str) -> dict[str, Place]:
        """See `Placed`."""

        def read_into(parameter: nn.Parameter) -> Place:
            def place(stored: Stored) -> None:
                fill(parameter, stored[self._own])

            return place

        return {f"{own}.weight": read_into(self.weight), f"{own}.bias": read_into(self.bias)}

    def forward(self, heads: Tensor) -> Tensor:
        """[n, heads, head_dim] → the same."""
        return functional.layer_norm(heads, heads.shape[-1:], eps=_EPS) * self.weight + self.bias


class OwnNormedAttention(SelfAttention):
    """Self-attention whose query and key heads are normed before rotation, each by its own weights."""

    def __init__(self, kind: LayerKind, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__(kind, config, group, dtype)
        heads = group.partition(config.heads_of(kind)), group.kv_partition(config.head_shape(kind).kv_heads)
        self.q_norm, self.k_norm = (HeadNorms(own, self.head_dim, dtype) for own in heads)

    def project(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, ...]:
        """See `SelfAttention.project`."""
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        query, key, _ = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        normed = torch.cat([self.q_norm(query), self.k_norm(key)], dim=1)
        rotated = self.ops.qk_norm_rotary(normed, rotary, self.heads, self.kv_heads, None, self.eps)
        return self.parts(rotated, heads)


class LateNormedAttention(SelfAttention):
    """Self-attention that norms rotated heads, for which the weights have a different meaning."""

    @property
    def gains(self) -> None:
        """Nothing is normed before."""
        return

    def parts(self, rotated: Tensor, heads: Tensor) -> tuple[Tensor, ...]:
        """See `SelfAttention.parts`."""
        query, key, *others = super().parts(rotated, heads)
        return self._normed(self.q_norm, query), self._normed(self.k_norm, key), *others

    def _normed(self, norm: object, heads: Tensor) -> Tensor:
        assert isinstance(norm, RMSNorm), "its family norms heads"
        normed: Tensor = norm(heads.reshape(-1, self.head_dim))
        return normed.view(heads.shape)


class NormedOutputAttention(SelfAttention):
    """Attention whose output is normed by head, without a weight, before its gate."""

    def mix(self, inputs: tuple[Tensor, ...], cache: Tensor, batch: AttentionBatch) -> Tensor:
        """See `MixerPart`."""
        query, key, value, gates = inputs
        attended = batch.attend(query, key, value, cache)
        ones = torch.ones(self.head_dim, dtype=attended.dtype, device=attended.device)
        normed = self.ops.rms_norm(attended.view(-1, self.head_dim), ones, self.eps)
        return normed.view(attended.shape) * sigmoid(gates.flatten(1))
