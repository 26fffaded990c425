"""Self-attention to the blocks of tokens that an index chooses, for each head of keys and values others, as in MiniMax
M3."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from llm_service.families.family import LayerKind
from llm_service.layers.attention.backend import AttentionBackend, AttentionBatch
from llm_service.layers.attention.general_backend import attend_to_chosen
from llm_service.layers.cache_spec import IndexedCache, IndexedKV, PagedKV
from llm_service.layers.elementwise import sigmoid
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.linear.placement import length
from llm_service.layers.mixer import Rotary
from llm_service.layers.norms import RMSNorm
from llm_service.layers.ops import TORCH, RowOps
from llm_service.layers.self_attention.layer import SelfAttention
from llm_service.layers.sparse_attention.block_decodes import BlockDecodes, BlockIndexBackend, attend_to_blocks
from llm_service.layers.sparse_attention.chosen_chunks import ChosenBatch
from llm_service.layers.sparse_attention.index import BlockIndex, IndexKeys, IndexQuery
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.text import TextConfig


class BlockIndexer(nn.Module):
    """Makes an index's queries, one for each of a rank's heads of keys and values, and one key for each token, which
    every rank has. Both are normed, and as many of their first numbers rotated as of the layer's own heads."""

    stored_as: ClassVar[str] = "indexer"
    ops: RowOps = TORCH

    def __init__(self, config: TextConfig, heads: slice, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.block_index is not None, "a layer of this kind needs it"
        self.shape, self.heads, self.eps, self.dtype = config.block_index, length(heads), config.norm_eps, dtype
        dim, whole = self.shape.head_dim, slice(0, config.hidden_size)
        parts: dict[str, slice | tuple[slice, ...]] = {
            "q_proj": slice(heads.start * dim, heads.stop * dim),
            "k_proj": slice(0, dim),
        }
        self.qk = PackedLinear(whole, parts, bias=False, dtype=dtype, rounds=False)
        self.q_norm, self.k_norm = (RMSNorm.of(config, dim, dtype) for _ in range(2))

    @property
    def index(self) -> BlockIndex:
        """How it chooses."""
        return BlockIndex(self.shape.most, self.shape.size, self.shape.local)

    def ask(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """x [n, hidden] → queries [n, heads, head_dim], and keys [n, head_dim]."""
        dim = self.shape.head_dim
        made = self.qk(x).view(len(x), -1, dim)
        angles = tuple(table[..., :dim] for table in rotary)
        gains = self.q_norm.weight, self.k_norm.weight
        rotated = self.ops.qk_norm_rotary(made, angles, self.heads, 1, gains, self.eps)
        return rotated[:, :-1], rotated[:, -1]


class BlockSparseAttention(SelfAttention):
    """`mix` takes queries, keys and values, followed by the index's output for the same tokens."""

    def __init__(self, kind: LayerKind, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__(kind, config, group, dtype)
        self.index = BlockIndexer(config, group.kv_partition(config.kv_heads), dtype)
        self._scale = self._kind.softmax_scale(self.head_dim)

    def cache_spec(self) -> IndexedKV:
        """Keys and values, and an index key."""
        return IndexedKV(PagedKV(self.heads, self.kv_heads, self.head_dim, self._kind), self.index.shape.head_dim)

    def index_backend(self, attention: AttentionBackend, blocks: int, block_size: int) -> BlockIndexBackend:
        """See `IndexPart`."""
        index, device = self.index.index, self.index.k_norm.weight.device
        keys = self.index.heads, self.index.shape.head_dim, self.index.shape.head_dim, block_size, self.index.dtype
        return BlockIndexBackend(index, attention, blocks, IndexKeys(*keys, device, index.size, weighs=False))

    def project(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, ...]:
        """See `SelfAttention.project`."""
        return *super().project(x, rotary), *self.index.ask(x, rotary)

    def mix(self, inputs: tuple[Tensor, ...], cache: Any, batch: Any) -> Tensor:
        """See `IndexPart`."""
        query, key, value, *gates, asked, kept = inputs
        indexed: IndexedCache = cache
        attention: AttentionBatch = batch[0]
        index: ChosenBatch | BlockDecodes = batch[1]
        index.keep(kept, indexed.index)
        wanted = IndexQuery(self.index.index, asked, None, kept)
        if index.sees_all:
            attended = attention.attend(query, key, value, indexed.kv)
        elif isinstance(index, BlockDecodes):
            attended = self._decoded(query, key, value, indexed, index, wanted)
        else:
            attended = self._attended(query, key, value, indexed, index, wanted)
        return attended * sigmoid(gates[0].flatten(1)) if gates else attended

    def _decoded(
        self, query: Tensor, key: Tensor, value: Tensor, cache: IndexedCache, index: BlockDecodes, asked: IndexQuery
    ) -> Tensor:
        """As `AttentionBatch.attend`, of a token of each sequence."""
        keys, values = cache.kv.flatten(1, 2)  # each [slots, kv_heads, head_dim]
        keys[index.written], values[index.written] = key.to(keys.dtype), value.to(values.dtype)
        return attend_to_blocks(query, keys, values, *index.choose(asked, cache.index), self._scale).flatten(1)

    def _attended(
        self, query: Tensor, key: Tensor, value: Tensor, cache: IndexedCache, index: ChosenBatch, asked: IndexQuery
    ) -> Tensor:
        """As `AttentionBatch.attend`, if some chunks do not see everything."""
        out = query.new_empty(query.shape)
        if index.dense is not None:
            attended = index.dense.attend(query[index.rest], key[index.rest], value[index.rest], cache.kv)
            out[index.rest] = attended.view(-1, *query.shape[1:])
        keys, values = cache.kv.flatten(1, 2)  # each [slots, kv_heads, head_dim]
        for chunk, chosen in zip(index.chosen, index.choose(asked, cache.index), strict=True):
            here, new = slice(chunk.begin, chunk.end), chunk.slots[chunk.context :]
            keys[new], values[new] = key[here].to(keys.dtype), value[here].to(values.dtype)
            attend_to_chosen(out[here], query[here], keys, values, chunk.slots, chosen, self._scale)
        return out.flatten(1)
