"""Latent attention to the pools of tokens that an index chooses, its own or an earlier layer's, as in GLM-5 Next."""

from __future__ import annotations

from typing import ClassVar

from llm_service.layers.attention.backend import AttentionBackend
from llm_service.layers.indexed_latents import IndexedLatentAttention
from llm_service.layers.pool_index import PagedPools, PoolIndexer
from llm_service.layers.token_index import TokenIndexer


class PooledLatentAttention(IndexedLatentAttention):
    """One whose index has pools."""

    indexer: ClassVar[type[TokenIndexer]] = PoolIndexer

    def index_backend(self, attention: AttentionBackend, blocks: int, block_size: int) -> PagedPools:
        """See `IndexPart`."""
        chosen, device = self._chosen, self.products.weight.device
        return PagedPools(chosen.most, chosen.pool, attention, blocks, block_size, device)
