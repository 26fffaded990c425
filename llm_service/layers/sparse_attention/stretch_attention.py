"""Self-attention to the stretches of tokens that an index chooses, as in Qwen4: those whose keys a token's index
queries score highest."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from llm_service.families.family import LayerKind
from llm_service.layers.attention.backend import AttentionBackend, AttentionBatch
from llm_service.layers.cache_spec import IndexedCache, IndexedKV, PagedKV
from llm_service.layers.elementwise import sigmoid
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.mixer import Rotary
from llm_service.layers.norms import RMSNorm
from llm_service.layers.ops import apply_rotary
from llm_service.layers.self_attention.layer import SelfAttention
from llm_service.layers.sparse_attention.stretch_batches import StretchBatch, StretchIndexBackend
from llm_service.layers.sparse_attention.stretch_decodes import StretchDecodes
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.text import TextConfig


class StretchIndexer(nn.Module):
    """Makes an index's queries and keys; every rank has all of them. It keeps each token's projected key and its
    angles; and for each stretch, at its last token, the mean of its tokens' keys, normed and rotated by the angles of
    the first."""

    stored_as: ClassVar[str] = "indexer"

    def __init__(self, config: TextConfig, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.index is not None, "a layer of this kind needs it"
        self.shape = config.index
        dim, heads = self.shape.head_dim, self.shape.heads
        whole, all_heads = slice(0, config.hidden_size), slice(0, (heads + 1) * dim)
        self.qk = PackedLinear(whole, {"index_qk_proj": all_heads}, bias=False, dtype=dtype, rounds=False)
        self.q_layernorm = RMSNorm.of(config, dim, dtype)
        self.k_layernorm = RMSNorm.of(config, dim, dtype)
        self.kept_width = dim + config.rotary.dim

    def project(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """x [n, hidden] → queries [n, heads, head_dim], and what is kept of the tokens, [n, width]."""
        dim = self.shape.head_dim
        made = self.qk(x).view(len(x), -1, dim)
        asked = self.q_layernorm(made[:, :-1].reshape(-1, dim)).view(len(x), -1, dim)
        half = rotary[0].shape[-1] // 2  # both halves of a table are equal
        angles = [table[:, 0, :half].to(made.dtype) for table in rotary]
        return apply_rotary(asked, *rotary), torch.cat([made[:, -1], *angles], dim=1)

    def keep(self, kept: Tensor, cache: Tensor, batch: StretchBatch | StretchDecodes) -> None:
        """Writes what is kept of a batch's tokens, [n, width], and the keys of stretches that end among them, into one
        layer's cache [blocks + 1, block_size, width]."""
        flat, dim = cache.flatten(0, 1), self.shape.head_dim
        flat[batch.written] = kept.to(cache.dtype)
        if len(members := batch.members):
            tokens = flat[members]  # [m, stretch, width]
            made = self.k_layernorm(tokens[:, :, :dim].float().mean(dim=1).to(kept.dtype))
            halves = tokens[:, :1, dim:].to(kept.dtype).chunk(2, dim=2)
            cosine, sine = (torch.cat([half, half], dim=2) for half in halves)
            rotated = apply_rotary(made.unsqueeze(1), cosine, sine).squeeze(1)
            flat[batch.ends, :dim] = rotated.to(cache.dtype)


class StretchSparseAttention(SelfAttention):
    """`mix` takes queries, keys and values, followed by the index's output for the same tokens."""

    def __init__(self, kind: LayerKind, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__(kind, config, group, dtype)
        self.index = StretchIndexer(config, dtype)
        self._scale = self._kind.softmax_scale(self.head_dim)

    def cache_spec(self) -> IndexedKV:
        """Keys and values, and what the index keeps."""
        return IndexedKV(PagedKV(self.heads, self.kv_heads, self.head_dim, self._kind), self.index.kept_width)

    def index_backend(self, attention: AttentionBackend, blocks: int, block_size: int) -> StretchIndexBackend:
        """See `IndexPart`."""
        index, device = self.index.shape, self.index.q_layernorm.weight.device
        return StretchIndexBackend(index.stretch, index.kept, attention, blocks, block_size, device)

    def project(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, ...]:
        """See `SelfAttention.project`."""
        return *super().project(x, rotary), *self.index.project(x, rotary)

    def mix(self, inputs: tuple[Tensor, ...], cache: Any, batch: Any) -> Tensor:
        """See `IndexPart`."""
        query, key, value, *gates, asked, kept = inputs
        indexed: IndexedCache = cache
        attention: AttentionBatch = batch[0]
        chosen: StretchBatch | StretchDecodes = batch[1]
        self.index.keep(kept, indexed.index, chosen)
        if chosen.sees_all:
            attended = attention.attend(query, key, value, indexed.kv)
        else:
            attended = chosen.attend(query, key, value, indexed.kv, asked, indexed.index, self._scale)
        return attended * sigmoid(gates[0].flatten(1)) if gates else attended
