"""The choice of a block index for one token of each sequence, from metadata on the device only, so that it can be
captured in a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from llm_service.layers.attention.backend import AttentionBackend
from llm_service.layers.attention.metadata import AttentionMetadata
from llm_service.layers.sparse_attention.chosen_chunks import ChosenBackend
from llm_service.layers.sparse_attention.index import ROOM, BlockIndex, IndexKeys, IndexQuery


class ScoreBlocks(Protocol):
    """Index queries of one token of each sequence, and a cache of index keys [blocks + 1, block_size, head_dim] → for
    each head the highest product in each stretch of `size` tokens, float32 [s, heads, ⌈longest / size⌉]; undefined
    behind a sequence's last stretch, whose missing tokens do not count."""

    def __call__(self, asked: IndexQuery, cache: Tensor, metadata: AttentionMetadata, size: int) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class BlockDecodes:
    """Like `ChosenBatch`, for such a step, over metadata that can be refilled. Blocks of the cache have `block_size`
    tokens, and `null_slot` is that of padding."""

    index: BlockIndex
    block_size: int
    null_slot: int
    metadata: AttentionMetadata
    score: ScoreBlocks

    @property
    def sees_all(self) -> bool:
        """Whether no sequence may be so long that a token does not."""
        return self.metadata.longest <= self.index.reach

    @property
    def written(self) -> Tensor:
        """See `ChosenBatch`."""
        return self.metadata.slot_mapping.long()

    def keep(self, kept: Tensor, cache: Tensor) -> None:
        """See `ChosenBatch`."""
        cache.flatten(0, 1)[self.written] = kept.to(cache.dtype)

    def choose(self, asked: IndexQuery, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Slots int64 [s, heads, reach] that each sequence's token sees, different ones for each head of keys and
        values, and which of them are valid, bool. Padding sees the null slot."""
        heads, lengths = asked.query.shape[1], self.metadata.seq_lens.long()
        blocks = self.score(asked, cache, self.metadata, self.index.size).flatten(0, 1)
        own = (lengths - 1).clamp(min=0).repeat_interleave(heads)
        places = self.index.choose_blocks(blocks, own).unflatten(0, (-1, heads))
        table, nobody = self.metadata.block_table, (lengths == 0).view(-1, 1, 1)
        there = places.clamp(min=0)
        found = table.gather(1, (there // self.block_size).flatten(1)).view_as(there).long()
        slots = (found * self.block_size + there % self.block_size).masked_fill(nobody, self.null_slot)
        return slots, (places >= 0) | nobody


def score_by_torch(asked: IndexQuery, cache: Tensor, metadata: AttentionMetadata, size: int) -> Tensor:
    """See `ScoreBlocks`: so many stretches of each sequence at once as there is `ROOM` for."""
    keys, block_size, (count, heads, width) = cache.flatten(0, 1), cache.shape[1], asked.query.shape
    lengths = metadata.seq_lens.long().unsqueeze(1)
    many = -(-metadata.longest // size)
    step = max(1, ROOM // (4 * count * size * (width + heads)))
    parts = list[Tensor]()
    for begin in range(0, many, step):
        places = torch.arange(begin * size, min(begin + step, many) * size, device=cache.device)
        known = places.minimum((lengths - 1).clamp(min=0))
        slots = metadata.block_table.gather(1, known // block_size).long() * block_size + known % block_size
        slots = slots.masked_fill(lengths == 0, len(keys) - 1)
        products = asked.query.float() @ keys[slots].float().transpose(1, 2)
        products = products.masked_fill((places >= lengths).unsqueeze(1), -torch.inf)
        parts.append(products.unflatten(2, (-1, size)).amax(3))
    return torch.cat(parts, dim=2)


def attend_to_blocks(
    query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, seen: Tensor, scale: float | None
) -> Tensor:
    """Queries [s, heads, dim] attend to keys and values [·, kv_heads, dim] at slots int64 [s, kv_heads, k], where
    `seen`, bool → [s, heads, dim]. So many are gathered at once as there is `ROOM` for."""
    kv_heads = keys.shape[1]
    grouped = query.unflatten(1, (kv_heads, -1))  # [s, kv_heads, group, dim]
    rows = max(1, ROOM // (query.element_size() * kv_heads * slots.shape[2] * query.shape[2]))
    own = torch.arange(kv_heads, device=query.device).unsqueeze(1)
    parts = list[Tensor]()
    for each, here, there in zip(grouped.split(rows), slots.split(rows), seen.split(rows), strict=True):
        near, far = (part[here, own].to(query.dtype) for part in (keys, values))  # [s, kv_heads, k, dim]
        attended = functional.scaled_dot_product_attention(each, near, far, attn_mask=there.unsqueeze(2), scale=scale)
        parts.append(attended.flatten(1, 2))
    return torch.cat(parts)


class BlockIndexBackend(ChosenBackend):
    """Makes a step's batches, over metadata as well."""

    def __init__(self, index: BlockIndex, attention: AttentionBackend, blocks: int, keys: IndexKeys) -> None:
        super().__init__(index.reach, attention, keys.block_size, keys.device)
        self._index, self._size, self._score = index, keys.block_size, score_by(keys)
        self._null_slot = blocks * keys.block_size

    def over(self, metadata: AttentionMetadata) -> BlockDecodes:
        """See `StableIndexBackend`."""
        return BlockDecodes(self._index, self._size, self._null_slot, metadata, self._score)


def score_by(keys: IndexKeys) -> ScoreBlocks:
    """As `token_decodes.score_by`."""
    if keys.device.type == "cuda":
        from llm_service.layers.gpu import index_kernels, index_trial, row_kernels  # not everywhere is a Triton

        kernel = index_kernels.score_blocks
        if row_kernels.run_on(keys.device) and index_trial.gives_scores(kernel, score_by_torch, keys):
            return kernel
    return score_by_torch
