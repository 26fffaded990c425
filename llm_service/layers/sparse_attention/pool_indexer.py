"""The index of pools (GLM-5 Next): so many consecutive tokens share a key, and are chosen together; and its batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from llm_service.families.family import LayerKind
from llm_service.layers.attention.backend import AttentionBackend, PagedChunk
from llm_service.layers.attention.metadata import AttentionMetadata
from llm_service.layers.mixer import Rotary
from llm_service.layers.sparse_attention import token_decodes
from llm_service.layers.sparse_attention.chosen_chunks import ChosenBackend, ChosenBatch, apart, slots_of
from llm_service.layers.sparse_attention.index import IndexKeys, IndexQuery, PoolIndex
from llm_service.layers.sparse_attention.pool_decodes import PoolDecodes
from llm_service.layers.sparse_attention.token_decodes import TokenDecodes
from llm_service.layers.sparse_attention.token_indexer import TokenIndexer
from llm_service.model_config.text import TextConfig


class PoolIndexer(TokenIndexer):
    """An indexer without rotary positions. For each token it keeps a key, and a gate for each of its numbers, which
    weights it in its pool's key."""

    def __init__(self, kind: LayerKind, config: TextConfig, dtype: torch.dtype) -> None:
        super().__init__(kind, config, dtype)

        def empty(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(sizes, dtype=dtype), requires_grad=False)

        self.index_kpool_compress_gate = empty(self.shape.head_dim, config.hidden_size)
        self.index_kpool_compress_ape = empty(self.shape.pool, self.shape.head_dim)

    @property
    def kept_width(self) -> int:
        """See `TokenIndexer`."""
        return 2 * self.shape.head_dim

    @property
    def pools(self) -> PoolIndex:
        """How it chooses."""
        return PoolIndex(self.shape.most, self.shape.pool, self.index_kpool_compress_ape)

    def keep(self, kept: Tensor, cache: Tensor, batch: ChosenBatch | TokenDecodes) -> None:
        """See `TokenIndexer`; keys of the pools that end among these tokens are written as well."""
        assert isinstance(batch, PoolBatch | PoolDecodes), "it knows where pools end"
        batch.keep(kept, cache)
        flat = cache.flatten(0, 1)
        flat[batch.ends, : self.shape.head_dim] = self.pools.keys(flat[batch.members])

    def ask(self, x: Tensor, resid: Tensor, _: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """See `TokenIndexer`: what is kept of tokens instead of keys, [n, 2 · head_dim]."""
        heads, dim = self.shape.heads, self.shape.head_dim
        gates = functional.linear(x, self.index_kpool_compress_gate)
        kept = torch.cat([self.k_norm(self.keys(x)), gates], dim=1)
        return self.queries(resid).view(len(x), heads, dim), self.weights(x).float() * heads**-0.5, kept

    def query(self, asked: Tensor, weights: Tensor, kept: Tensor) -> IndexQuery:
        """See `TokenIndexer`."""
        return IndexQuery(self.pools, asked, weights, kept, self.shape.head_dim**-0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBatch(ChosenBatch):
    """`members` int64 [m, pool] are the slots of the tokens of pools that end among the step's tokens."""

    members: Tensor

    @property
    def ends(self) -> Tensor:
        """The slots of pools' keys, int64 [m]."""
        return self.members[:, -1]


class PoolIndexBackend(ChosenBackend):
    """Makes a step's batches, over metadata as well. If at most `most` tokens are in whole pools, all are seen."""

    def __init__(self, most: int, attention: AttentionBackend, blocks: int, keys: IndexKeys) -> None:
        super().__init__(most + keys.pool - 1, attention, keys.block_size, keys.device)
        self._most, self._pool, self._null_slot = most, keys.pool, blocks * keys.block_size
        self._score = partial(token_decodes.score_by(keys), pool=keys.pool)

    def batch(self, chunks: Sequence[PagedChunk]) -> PoolBatch:
        """See `IndexBackend`."""
        every = [slots_of(chunk, self._block_size) for chunk in chunks]
        ended = [
            slots[self._begun(chunk.context) : self._begun(len(slots))]
            for slots, chunk in zip(every, chunks, strict=True)
        ]
        found, (members,) = apart(chunks, self._reach, self._block_size, self._device, np.concatenate(ended))
        dense = self._attention.batch(found.near) if found.near else None
        members = members.view(-1, self._pool)
        return PoolBatch(found.written, found.chosen, found.rest, dense, members=members)

    def over(self, metadata: AttentionMetadata) -> PoolDecodes:
        """See `StableIndexBackend`."""
        return PoolDecodes(self._most, self._block_size, self._null_slot, metadata, self._score, pool=self._pool)

    def _begun(self, count: int) -> int:
        """How many of so many tokens are in whole pools."""
        return count // self._pool * self._pool
