"""Latent attention to the pools of tokens that an index chooses, its own or an earlier layer's, as in GLM-5 Next."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from llm_service.layers.attention.backend import AttentionBackend
from llm_service.layers.mla.sparse import SparseLatentAttention
from llm_service.layers.sparse_attention.pool_indexer import PoolIndexBackend, PoolIndexer
from llm_service.layers.sparse_attention.token_indexer import TokenIndexer


class PooledSparseLatentAttention(SparseLatentAttention):
    """One whose index has pools."""

    indexer: ClassVar[type[TokenIndexer]] = PoolIndexer

    def index_backend(self, attention: AttentionBackend, blocks: int, block_size: int) -> PoolIndexBackend:
        """See `IndexPart`."""
        keys = replace(self.index_keys(block_size), kept=2 * self._chosen.head_dim, pool=self._chosen.pool)
        return PoolIndexBackend(self._chosen.most, attention, blocks, keys)
