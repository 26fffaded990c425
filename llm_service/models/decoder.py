"""The decoder that the Qwen families share: pre-norm attention and a gated MLP, with deepstack rows added on the way.

It knows nothing of requests: it maps input embeddings and an attention batch to hidden states. A family is a subclass
that says what its attention has (biases, or norms of queries and keys).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from common.linear import Linear
from llm_service.layers.attention.backend import AttentionBatch, NumbaCompiled
from llm_service.layers.cpu.few_rows import FewRows, Heads
from llm_service.layers.experts import Experts, SparseMLP
from llm_service.layers.gate import silu_and_mul
from llm_service.layers.group import TensorGroup
from llm_service.layers.kernels import row_kernel_names, row_kernels
from llm_service.layers.linear import PackedLinear, VocabularyEmbedding
from llm_service.layers.norm import RMSNorm
from llm_service.layers.rotary import MultimodalRotary, apply_rotary
from llm_service.models.config import TextConfig

_GROUPED = (9, 10)
"""Compute capabilities (their first part) for which torch's grouped product has a kernel of its own."""


@dataclass(frozen=True, slots=True)
class Deepstack:
    """Rows to add after the first layers: level i, `values[i]` [m, hidden], to the places `index` int64 [m], or, where
    that is None, to all places, one after the other."""

    index: Tensor | None
    values: Tensor

    def reaches(self, layer: int) -> bool:
        """Whether a layer has a level."""
        return layer < self.values.shape[0]

    def add_to(self, hidden: Tensor, layer: int) -> None:
        """Adds a layer's level in place; does nothing past the last level."""
        if not self.reaches(layer):
            return
        if self.index is None:
            hidden += self.values[layer]
        else:
            hidden.index_add_(0, self.index, self.values[layer])


class Attention(nn.Module):
    """Grouped-query attention; `bias` on its inputs (Qwen2) or norms of each query and key head (Qwen3)."""

    def __init__(
        self, config: TextConfig, group: TensorGroup, dtype: torch.dtype, *, bias: bool, qk_norm: bool
    ) -> None:
        super().__init__()
        self._group = group
        self.head_dim = config.head_dim
        own, shared = group.share(config.heads), group.kv_share(config.kv_heads)
        self.heads, self.kv_heads = _count(own), _count(shared)
        query, key = _elements(own, self.head_dim), _elements(shared, self.head_dim)
        whole = slice(0, config.hidden_size)
        self.qkv = PackedLinear(whole, {"q_proj": query, "k_proj": key, "v_proj": key}, bias=bias, dtype=dtype)
        self.o = PackedLinear(query, {"o_proj": whole}, bias=False, dtype=dtype)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps, dtype) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps, dtype) if qk_norm else nn.Identity()

    def project(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x [n, hidden] → this rank's queries [n, heads, head_dim], keys and values [n, kv_heads, head_dim]."""
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        query, key, value = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if kernels := row_kernels(x):
            shape = self.shape()
            rotated = kernels.qk_norm_rotary(heads, *rotary, self.heads, self.kv_heads, shape.gains, shape.eps)
            return *rotated.split([self.heads, self.kv_heads], dim=1), value
        return apply_rotary(self.q_norm(query), *rotary), apply_rotary(self.k_norm(key), *rotary), value

    def shape(self) -> Heads:
        """How many heads there are, and their norms."""
        if isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            gains = self.q_norm.weight, self.k_norm.weight
            return Heads(self.heads, self.kv_heads, self.head_dim, gains, self.q_norm.eps)
        return Heads(self.heads, self.kv_heads, self.head_dim, None, 0.0)

    def join(self, attended: Tensor) -> Tensor:
        """All ranks' heads [n, heads · head_dim] → [n, hidden]."""
        return self._group.sum(self.o(attended))


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self._group = group
        inner, whole = group.share(config.intermediate_size), slice(0, config.hidden_size)
        self.gate_up = PackedLinear(whole, {"gate_proj": inner, "up_proj": inner}, bias=False, dtype=dtype)
        self.down = PackedLinear(inner, {"down_proj": whole}, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[n, hidden] → [n, hidden]."""
        return self._group.sum(self.down(silu_and_mul(self.gate_up(x))))


def feed_forward(index: int, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> nn.Module:
    """A layer's feed-forward part: dense, or a mixture of experts."""
    if not config.is_sparse(index):
        return MLP(config, group, dtype)
    count, per_token = config.experts, config.experts_per_token
    return SparseMLP(count, per_token, config.hidden_size, config.expert_size, group, dtype)


class Layer(nn.Module):
    """One decoder layer; `index` counts them from 0."""

    def __init__(
        self, index: int, config: TextConfig, group: TensorGroup, dtype: torch.dtype, *, bias: bool, qk_norm: bool
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.self_attn = Attention(config, group, dtype, bias=bias, qk_norm=qk_norm)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.mlp = feed_forward(index, config, group, dtype)
        self._alone = group.size == 1
        self.few_rows: FewRows | None = None

    def finalize(self) -> None:
        """Called when the weights are final and laid out: how few rows are computed where nothing better is there."""
        attention, mlp = self.self_attn, self.mlp
        if not (self._alone and isinstance(mlp, MLP) and self.input_layernorm.weight.dtype == torch.float32):
            return
        linears = (attention.qkv, attention.o, mlp.gate_up, mlp.down)
        norms = self.input_layernorm, self.post_attention_layernorm
        self.few_rows = FewRows.of(linears, attention.shape(), norms)

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
        if self.few_rows is not None and self.few_rows.takes(x):
            return self.few_rows.before(x, rotary)
        return self.self_attn.project(self.input_layernorm(x), rotary)

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        """[n, hidden], and this rank's heads [n, heads · head_dim] → [n, hidden]."""
        if self.few_rows is not None and self.few_rows.takes(x):
            return self.few_rows.after(x, attended)
        x = x + self.self_attn.join(attended)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """One rank's share of a decoder: embeddings in, hidden states out; logits on demand."""

    bias = False
    qk_norm = False

    def __init__(self, config: TextConfig, group: TensorGroup, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self._group = group
        self.kv_heads = _count(group.kv_share(config.kv_heads))
        layers, whole = range(config.layers), slice(0, config.hidden_size)
        with device:  # weights are made there: the host need not hold all of them, nor copy what is not filled yet
            self.embed_tokens = VocabularyEmbedding(config.vocab_size, config.hidden_size, group, dtype)
            self.layers = nn.ModuleList(
                Layer(index, config, group, dtype, bias=self.bias, qk_norm=self.qk_norm) for index in layers
            )
            self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
            words = {"lm_head": group.vocabulary_share(config.vocab_size)}
            self.lm_head = PackedLinear(whole, words, bias=False, dtype=dtype)
        if config.tied:
            self.lm_head.weight = self.embed_tokens.weight
        self.rotary = MultimodalRotary(
            config.head_dim,
            config.rope_theta,
            config.mrope_sections,
            interleaved=config.mrope_interleaved,
            device=device,
        )

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        caches: Tensor,
        batch: AttentionBatch,
        deepstack: Deepstack | None,
        places: Tensor | None = None,
    ) -> Tensor:
        """hidden [n, hidden], positions int [3, n], caches of all layers → [n, hidden].

        With `places` int64 [m], m > 0, only theirs are wanted, [m, hidden]: the last layer, whose keys no other layer
        needs more of, then computes little else.
        """
        rotary = self.rotary.tables(positions, hidden.dtype)
        for index, layer in enumerate(self.layers):
            last = index == self.config.layers - 1
            cut = places if last and not (deepstack is not None and deepstack.reaches(index)) else None
            hidden = layer(hidden, rotary, caches[index], batch, cut)
            if deepstack is not None:
                deepstack.add_to(hidden, index)
            if last and places is not None and cut is None:
                hidden = hidden[places]
        out: Tensor = self.norm(hidden)
        return out

    def finalize(self) -> None:
        """Called when the weights are final and laid out."""
        if self.lm_head.weight is not self.embed_tokens.weight:
            self.embed_tokens.finalize()
        for layer in self.layers:
            if isinstance(layer, Layer):
                layer.finalize()

    def kernels(self) -> set[str]:
        """Names of our kernels for CPUs that this needs, as `llm_service.layers.cpu.jit.find` takes them."""
        forms: list[object] = [part.laid_out for part in self.modules() if isinstance(part, Linear)]
        for part in self.modules():
            forms += [form for both in part.laid_out for form in both] if isinstance(part, Experts) else []
        compiled = (form.kernels for form in forms if isinstance(form, NumbaCompiled))
        return row_kernel_names(self.norm.weight).union(*compiled)

    def compile_layers(self) -> None:
        """Has torch compile what is before and after attention in each layer, at its next use.

        The layers share what is compiled, since their weights are arguments of it.
        """
        for layer in self.layers:
            for name in ("before", "after"):
                setattr(layer, name, torch.compile(getattr(layer, name), dynamic=True))

    def not_capturable(self) -> str:
        """Why this decoder cannot be captured in a CUDA graph; empty where it can. The grouped product of experts asks
        the device for its groups' sizes, except in the kernel that torch has for some GPUs."""
        weight = self.norm.weight
        if not self.config.experts:
            return ""
        if weight.dtype == torch.bfloat16 and torch.cuda.get_device_capability(weight.device)[0] in _GROUPED:
            return ""
        return "experts can be captured in bfloat16, on GPUs of compute capability 9 and 10"

    def logits(self, hidden: Tensor) -> Tensor:
        """[m, hidden] → float32 [m, vocabulary], on every rank."""
        return self._group.join(self.lm_head(hidden), self.config.vocab_size).float()


def _elements(heads: slice, head_dim: int) -> slice:
    """The rows of a projection that belong to some heads."""
    return slice(heads.start * head_dim, heads.stop * head_dim)


def _count(part: slice) -> int:
    return int(part.stop - part.start)
