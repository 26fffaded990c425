"""Latent attention to tokens that an index chooses, as in DeepSeek-V3.2: for absorbed queries, the tokens chosen by
each are gathered, if that is cheaper than reading all. Layers may use an earlier one's choice, and an earlier one's
latents, as in Mistral Large 4."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from llm_service.families.family import LayerKind
from llm_service.layers.attention.backend import AttentionBackend, AttentionBatch
from llm_service.layers.attention.general_backend import attend_to_chosen, gathers
from llm_service.layers.cache_spec import IndexedCache, IndexedKV, SharedKV
from llm_service.layers.mixer import HandedOn, Rotary
from llm_service.layers.mla.chunks import attend_expanded
from llm_service.layers.mla.latent_attention import LatentAttention
from llm_service.layers.mla.up_projections import KvUpProjections
from llm_service.layers.sparse_attention.chosen_chunks import ChosenBackend, ChosenBatch, ChosenChunk
from llm_service.layers.sparse_attention.index import IndexKeys, mask_of
from llm_service.layers.sparse_attention.token_decodes import TokenDecodes, TokenIndexBackend, attend_to_listed
from llm_service.layers.sparse_attention.token_indexer import TokenIndexer
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.latent import LatentHeads
from llm_service.model_config.text import TextConfig


class SparseLatentAttention(LatentAttention):
    """`mix` takes queries and latents, followed by the index's output for the same tokens, unless another layer's
    choice applies."""

    indexer: ClassVar[type[TokenIndexer]] = TokenIndexer

    def __init__(self, kind: LayerKind, config: TextConfig, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__(kind, config, group, dtype)
        assert config.token_index is not None, "a layer of this kind needs it"
        self._chosen = config.token_index
        self.index = self.indexer(kind, config, dtype) if kind.chooses else None

    def cache_spec(self) -> IndexedKV:
        """One head's keys, or whose, and what the index keeps."""
        kv = self.kept if self._keys_of is None else SharedKV(self._keys_of)
        return IndexedKV(kv, 0 if self.index is None else self.index.kept_width)

    def index_backend(self, attention: AttentionBackend, blocks: int, block_size: int) -> ChosenBackend:
        """See `IndexPart`."""
        return TokenIndexBackend(self._chosen.most, attention, blocks, self.index_keys(block_size))

    def index_keys(self, block_size: int) -> IndexKeys:
        """What tokens are scored by in a cache with blocks of this size, here or in the layer that chooses for this
        one."""
        heads, width, like = self._chosen.heads, self._chosen.head_dim, self.products.weight
        return IndexKeys(heads, width, width, block_size, like.dtype, like.device)

    def project(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, ...]:
        """See `LatentAttention.project`."""
        made, latent = self.apart(x)
        resid = self.resid(made)
        keys = (self.key(latent, (rotary[0], rotary[1])),) if self._keys_of is None else ()
        asked = () if self.index is None else self.index.ask(x, resid, rotary)
        return self.queries(resid, rotary), *keys, *self.gates(x), *asked

    def mix(self, inputs: tuple[Tensor, ...], cache: Any, batch: Any, kept: HandedOn | None = None) -> Tensor:
        """See `IndexPart`."""
        query, *others = inputs
        indexed: IndexedCache = cache
        attention: AttentionBatch = batch[0]
        index: ChosenBatch | TokenDecodes = batch[1]
        latents = indexed.kv[0].flatten(0, 1)
        own = self._keys_of is None  # else attention would write the same again
        key = others.pop(0) if own else latents[index.written].to(query.dtype)
        gates = [others.pop(0)] if self.head_gates is not None else []
        if self.index is not None:
            self.index.keep(others[2], indexed.index, index)
        if index.sees_all:
            return self.opened(self.attended(query, key, indexed.kv, attention), gates)
        choice = self._choice(others, indexed.index, index, kept)
        if isinstance(index, TokenDecodes):
            latents[index.written] = key.to(latents.dtype)
            slots, seen = choice
            absorbed, shape = self.products.absorbed(query), self.shape
            mixed = attend_to_listed(absorbed, latents[:, 0], slots, seen, shape.scale, shape.rank, self.lost)
            return self.opened(self.products.values(mixed), gates)
        out = query.new_empty(*query.shape[:2], self.shape.value)
        if index.dense is not None:
            attended = self.attended(query[index.rest], key[index.rest], indexed.kv, index.dense)
            out[index.rest] = attended.view(-1, *out.shape[1:])
        for chunk in index.chosen:
            latents[chunk.slots[chunk.context :]] = key[chunk.begin : chunk.end].to(latents.dtype)
        parts = zip(index.chosen, choice, strict=True)
        mix_chosen(out, query, latents, parts, self.shape, self.products, self.lost)
        return self.opened(out.flatten(1), gates)

    def _choice(
        self, asked: list[Tensor], cache: Tensor, index: ChosenBatch | TokenDecodes, kept: HandedOn | None
    ) -> list[Tensor]:
        """The index's choice, in the form of its batch, or that of the last layer before."""
        if self.index is None:
            assert kept is not None, "an earlier layer chose"
            assert kept.choice is not None, "an earlier layer chose"
            return kept.choice
        choice = index.choose(self.index.query(asked[0], asked[1], asked[2]), cache)
        if kept is not None:
            kept.choice = choice
        return choice


def mix_chosen(
    out: Tensor,
    query: Tensor,
    keys: Tensor,
    parts: Iterable[tuple[ChosenChunk, Tensor]],
    shape: LatentHeads,
    products: KvUpProjections,
    sinks: Tensor | None = None,
) -> None:
    """Fills out [n, heads, value] at the positions of these chunks, whose tokens see the positions int64 [count, k], -1
    for none, for queries [n, heads, rotated + plain] and the whole cache, [slots, 1, rank + rotated]; `sinks` float32
    [heads] are as in `attend_by_scores`."""
    absorbed = list[tuple[ChosenChunk, Tensor]]()
    for chunk, chosen in parts:
        total, count = len(chunk.slots), chunk.end - chunk.begin
        if gathers(chosen.unsqueeze(1), total, query.shape[1]) or not shape.expands(count, chunk.context):
            absorbed.append((chunk, chosen))
            continue
        here, seen = slice(chunk.begin, chunk.end), keys[chunk.slots, 0]
        attend_expanded(out[here], query[here], seen, mask_of(chosen, total), shape, products, sinks)
    if absorbed:  # their matrices are read once
        places = torch.cat([torch.arange(chunk.begin, chunk.end, device=query.device) for chunk, _ in absorbed])
        queries = products.absorbed(query[places])
        mixed, at = queries.new_empty(*queries.shape[:2], shape.rank), 0
        for chunk, chosen in absorbed:
            here = slice(at, at + len(chosen))
            attend_to_chosen(mixed[here], queries[here], keys, keys, chunk.slots, chosen, shape.scale, sinks)
            at = here.stop
        out[places] = products.values(mixed).view(-1, *out.shape[1:])
