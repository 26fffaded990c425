"""The decoder that the Qwen families share: pre-norm attention and a gated MLP, with deepstack rows added on the way.

It knows nothing of requests: it maps input embeddings and an attention batch to hidden states. A family is a subclass
that says what its attention has (biases, or norms of queries and keys).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from llm_service.layers.attention import AttentionBatch, paged_attention
from llm_service.layers.linear import PackedLinear
from llm_service.layers.norm import RMSNorm
from llm_service.layers.rotary import MultimodalRotary, rotate
from llm_service.models.config import TextConfig


@dataclass(frozen=True, slots=True)
class Deepstack:
    """Rows to add after the first layers: level i, `values[i]` [m, hidden], to the places `index` int64 [m]."""

    index: Tensor
    values: Tensor

    def add_to(self, hidden: Tensor, layer: int) -> None:
        """Adds a layer's level in place; does nothing past the last level."""
        if layer < self.values.shape[0]:
            hidden.index_add_(0, self.index, self.values[layer])


class Attention(nn.Module):
    """Grouped-query attention; `bias` on its inputs (Qwen2) or norms of each query and key head (Qwen3)."""

    def __init__(self, config: TextConfig, dtype: torch.dtype, *, bias: bool, qk_norm: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        sizes = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        parts = {name: count * self.head_dim for name, count in sizes.items()}
        self.qkv = PackedLinear(config.hidden_size, parts, bias=bias, dtype=dtype)
        self.o = PackedLinear(self.heads * self.head_dim, {"o_proj": config.hidden_size}, bias=False, dtype=dtype)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps, dtype) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps, dtype) if qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], cache: Tensor, batch: AttentionBatch) -> Tensor:
        """x [n, hidden]; `cache` is this layer's → [n, hidden]."""
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        query, key, value = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        query = rotate(self.q_norm(query), *rotary)
        key = rotate(self.k_norm(key), *rotary)
        out: Tensor = self.o(paged_attention(query, key, value, cache, batch, self.head_dim**-0.5))
        return out


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, config: TextConfig, dtype: torch.dtype) -> None:
        super().__init__()
        size = config.intermediate_size
        self.gate_up = PackedLinear(config.hidden_size, {"gate_proj": size, "up_proj": size}, bias=False, dtype=dtype)
        self.down = PackedLinear(size, {"down_proj": config.hidden_size}, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[n, hidden] → [n, hidden]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.down(functional.silu(gate) * up)
        return out


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: TextConfig, dtype: torch.dtype, *, bias: bool, qk_norm: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.self_attn = Attention(config, dtype, bias=bias, qk_norm=qk_norm)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.mlp = MLP(config, dtype)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], cache: Tensor, batch: AttentionBatch) -> Tensor:
        """[n, hidden] → [n, hidden], in place of x."""
        x = x + self.self_attn(self.input_layernorm(x), rotary, cache, batch)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embeddings in, hidden states out; logits on demand."""

    bias = False
    qk_norm = False

    def __init__(self, config: TextConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.embed_tokens.requires_grad_(False)
        self.layers = nn.ModuleList(
            Layer(config, dtype, bias=self.bias, qk_norm=self.qk_norm) for _ in range(config.layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.lm_head = PackedLinear(config.hidden_size, {"lm_head": config.vocab_size}, bias=False, dtype=dtype)
        if config.tied:
            self.lm_head.weight = self.embed_tokens.weight
        self.to(device)
        self.rotary = MultimodalRotary(
            config.head_dim,
            config.rope_theta,
            config.mrope_sections,
            interleaved=config.mrope_interleaved,
            device=device,
        )

    def forward(
        self, hidden: Tensor, positions: Tensor, caches: Tensor, batch: AttentionBatch, deepstack: Deepstack | None
    ) -> Tensor:
        """hidden [n, hidden], positions int [3, n], caches [layers, 2, kv_heads, slots, head_dim] → [n, hidden]."""
        rotary = self.rotary.tables(positions, hidden.dtype)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, rotary, caches[index], batch)
            if deepstack is not None:
                deepstack.add_to(hidden, index)
        out: Tensor = self.norm(hidden)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[m, hidden] → float32 [m, vocabulary]."""
        logits: Tensor = self.lm_head(hidden)
        return logits.float()
