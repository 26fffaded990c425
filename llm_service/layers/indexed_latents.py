"""Latent attention to the tokens that an index chooses, as in DeepSeek-V3.2: for queries that meet latents, those that
each has chosen are gathered, where that takes less than to go through all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from llm_service.families.family import LayerKind
from llm_service.layers.attention.backend import AttentionBackend, AttentionBatch
from llm_service.layers.attention.general_backend import attend_to_chosen, gathers
from llm_service.layers.cache_spec import IndexedCache, IndexedKV
from llm_service.layers.chosen_chunks import ChosenBatch, ChosenChunk
from llm_service.layers.group import TensorGroup
from llm_service.layers.index_keys import mask_of
from llm_service.layers.latent_attention import LatentAttention
from llm_service.layers.latent_chunks import attend_expanded
from llm_service.layers.latent_products import LatentProducts
from llm_service.layers.mixer import Rotary
from llm_service.layers.token_decode import PagedTokenIndex, TokenIndexDecodes, attend_to_listed
from llm_service.layers.token_index import TokenIndexer
from llm_service.models.config import TextConfig
from llm_service.models.latent_config import LatentHeads


class IndexedLatentAttention(LatentAttention):
    """What `mix` takes of queries and latents is followed by what the index makes of the same tokens."""

    def __init__(self, kind: LayerKind, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__(kind, config, group, dtype)
        self.index = TokenIndexer(config, dtype)

    def cache_spec(self) -> IndexedKV:
        """One head's keys, and an index key."""
        return IndexedKV(self.kept, self.index.shape.head_dim)

    def index_backend(self, attention: AttentionBackend, blocks: int, block_size: int) -> PagedTokenIndex:
        """See `IndexPart`."""
        device = self.index.k_norm.weight.device
        return PagedTokenIndex(self.index.shape.most, attention, blocks, block_size, device)

    def project(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, ...]:
        """See `LatentAttention.project`."""
        made, latent = self.apart(x)
        resid = self.resid(made)
        key = self.key(latent, (rotary[0], rotary[1]))
        return self.queries(resid, rotary), key, *self.gates(x), *self.index.ask(x, resid, rotary)

    def mix(self, inputs: tuple[Tensor, ...], cache: Any, batch: Any) -> Tensor:
        """See `IndexPart`."""
        query, key, *gates, asked, weights, kept = inputs
        indexed: IndexedCache = cache
        attention: AttentionBatch = batch[0]
        index: ChosenBatch | TokenIndexDecodes = batch[1]
        index.keep(kept, indexed.index)
        if index.sees_all:
            return self.opened(self.attended(query, key, indexed.kv, attention), gates)
        wanted, latents = self.index.query(asked, weights, kept), indexed.kv[0].flatten(0, 1)
        if isinstance(index, TokenIndexDecodes):
            latents[index.written] = key.to(latents.dtype)
            listed, shape = index.chosen(wanted, indexed.index), self.shape
            mixed = attend_to_listed(self.products.absorbed(query), latents[:, 0], *listed, shape.scale, shape.rank)
            return self.opened(self.products.values(mixed), gates)
        out = query.new_empty(*query.shape[:2], self.shape.value)
        if index.dense is not None:
            attended = self.attended(query[index.rest], key[index.rest], indexed.kv, index.dense)
            out[index.rest] = attended.view(-1, *out.shape[1:])
        for chunk in index.chosen:
            latents[chunk.slots[chunk.context :]] = key[chunk.begin : chunk.end].to(latents.dtype)
        mix_chosen(out, query, latents, index.choose(wanted, indexed.index), self.shape, self.products)
        return self.opened(out.flatten(1), gates)


def mix_chosen(
    out: Tensor,
    query: Tensor,
    keys: Tensor,
    parts: Iterable[tuple[ChosenChunk, Tensor]],
    shape: LatentHeads,
    products: LatentProducts,
) -> None:
    """Fills out [n, heads, value] at the places of these chunks, of which each token sees some places, int64 [count,
    k], -1 where there are no more, for queries [n, heads, rotated + plain] and all that the cache keeps, [slots, 1,
    rank + rotated]."""
    absorbed = list[tuple[ChosenChunk, Tensor]]()
    for chunk, chosen in parts:
        total, count = len(chunk.slots), chunk.end - chunk.begin
        if gathers(chosen.unsqueeze(1), total, query.shape[1]) or not shape.expands(count, chunk.context):
            absorbed.append((chunk, chosen))
            continue
        here, seen = slice(chunk.begin, chunk.end), keys[chunk.slots, 0]
        attend_expanded(out[here], query[here], seen, mask_of(chosen, total), shape, products)
    if absorbed:  # their matrices are read once
        places = torch.cat([torch.arange(chunk.begin, chunk.end, device=query.device) for chunk, _ in absorbed])
        queries = products.absorbed(query[places])
        mixed, at = queries.new_empty(*queries.shape[:2], shape.rank), 0
        for chunk, chosen in absorbed:
            here = slice(at, at + len(chosen))
            attend_to_chosen(mixed[here], queries[here], keys, keys, chunk.slots, chosen, shape.scale)
            at = here.stop
        out[places] = products.values(mixed).view(-1, *out.shape[1:])
