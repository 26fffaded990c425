"""The choice of a token index for one token of each sequence, from metadata on the device only, so that it can be
captured in a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llm_service.layers.attention.backend import AttentionBackend
from llm_service.layers.attention.metadata import AttentionMetadata
from llm_service.layers.attention.scored import softmax_with_sinks
from llm_service.layers.sparse_attention.chosen_chunks import ChosenBackend
from llm_service.layers.sparse_attention.index import ROOM, IndexKeys, IndexQuery, best


class ScoreTokens(Protocol):
    """Index queries of one token of each sequence, and a cache of index keys [blocks + 1, block_size, ≥ head_dim] →
    scores of all tokens of these, float32 [s, longest // pool], undefined behind a sequence's end.

    Of `pool` consecutive tokens scored together, the last has their key.
    """

    def __call__(self, asked: IndexQuery, cache: Tensor, metadata: AttentionMetadata, pool: int = 1) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class TokenDecodes:
    """Like `ChosenBatch`, for such a step, over metadata that can be refilled. `null_slot` is that of padding."""

    most: int
    block_size: int
    null_slot: int
    metadata: AttentionMetadata
    score: ScoreTokens

    @property
    def sees_all(self) -> bool:
        """Whether no sequence may be so long that a token does not."""
        return self.metadata.longest <= self.most

    @property
    def written(self) -> Tensor:
        """See `ChosenBatch`."""
        return self.metadata.slot_mapping.long()

    def keep(self, kept: Tensor, cache: Tensor) -> None:
        """See `ChosenBatch`."""
        cache.flatten(0, 1)[self.written] = kept.to(cache.dtype)

    def choose(self, asked: IndexQuery, cache: Tensor) -> list[Tensor]:
        """Slots int64 [s, most] that each sequence's token sees, and which of them are valid, bool. So many sequences
        are searched at once as there is `ROOM` for; padding sees the null slot."""
        lengths = self.metadata.seq_lens.long()
        scores = self.score(asked, cache, self.metadata)
        rows = max(1, ROOM // (8 * scores.shape[1]))
        found = [best(*each, self.most) for each in zip(scores.split(rows), lengths.split(rows), strict=True)]
        return self.listed(torch.cat(found))

    def listed(self, places: Tensor) -> list[Tensor]:
        """The same for positions int64 [s, k] in sequences, -1 for none."""
        table, nobody = self.metadata.block_table, (self.metadata.seq_lens == 0).unsqueeze(1)
        own = places.clamp(min=0)
        slots = table.gather(1, own // self.block_size).long() * self.block_size + own % self.block_size
        return [slots.masked_fill(nobody, self.null_slot), (places >= 0) | nobody]


def score_by_torch(asked: IndexQuery, cache: Tensor, metadata: AttentionMetadata, pool: int = 1) -> Tensor:
    """See `ScoreTokens`: so many tokens of each sequence at once as there is `ROOM` for."""
    assert asked.weights is not None, "heads count by weights"
    keys, size, count = cache.flatten(0, 1), cache.shape[1], len(asked.query)
    last = (metadata.seq_lens.long() - 1).clamp(min=0).unsqueeze(1)
    step = max(1, ROOM // (4 * count * (cache.shape[2] + asked.query.shape[1])))
    parts = list[Tensor]()
    for begin in range(0, metadata.longest // pool, step):
        numbers = torch.arange(begin, min(begin + step, metadata.longest // pool), device=cache.device)
        places = (numbers * pool + pool - 1).minimum(last)
        slots = metadata.block_table.gather(1, places // size).long() * size + places % size
        slots = slots.masked_fill((metadata.seq_lens == 0).unsqueeze(1), len(keys) - 1)
        products = asked.query.float() @ keys[slots, : asked.query.shape[2]].float().transpose(1, 2)
        products = products.mul_(asked.scale).relu_()
        parts.append((asked.weights.unsqueeze(1) @ products).squeeze(1))
    return torch.cat(parts, dim=1)


def attend_to_listed(
    query: Tensor,
    keys: Tensor,
    slots: Tensor,
    seen: Tensor,
    scale: float,
    depth: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """Queries [s, heads, width] attend to keys [·, width] at slots int64 [s, k], where `seen`, bool; the first `depth`
    numbers of keys are values → [s, heads, depth]. So many are gathered at once as there is `ROOM` for. `sinks` float32
    [heads] are as in `attend_by_scores`."""
    rows = max(1, ROOM // (query.element_size() * slots.shape[1] * query.shape[2]))
    parts = list[Tensor]()
    for own, here, there in zip(query.split(rows), slots.split(rows), seen.split(rows), strict=True):
        near = keys[here].to(query.dtype)  # [s, k, width]
        scores = (own @ near.transpose(1, 2)).float() * scale
        scores = scores.masked_fill(~there.unsqueeze(1), -torch.inf)
        weights = softmax_with_sinks(scores, None if sinks is None else sinks.unsqueeze(1))
        parts.append(weights.to(query.dtype) @ near[..., :depth])
    return torch.cat(parts)


class TokenIndexBackend(ChosenBackend):
    """Makes a step's batches, over metadata as well."""

    def __init__(self, most: int, attention: AttentionBackend, blocks: int, keys: IndexKeys) -> None:
        super().__init__(most, attention, keys.block_size, keys.device)
        self._most, self._size, self._score = most, keys.block_size, score_by(keys)
        self._null_slot = blocks * keys.block_size

    def over(self, metadata: AttentionMetadata) -> TokenDecodes:
        """See `StableIndexBackend`."""
        return TokenDecodes(self._most, self._size, self._null_slot, metadata, self._score)


def score_by(keys: IndexKeys) -> ScoreTokens:
    """The scoring function for such keys: our kernel, if there is one for their device, and it passes a trial."""
    if keys.device.type == "cuda":
        from llm_service.layers.gpu import index_kernels, index_trial, row_kernels  # not everywhere is a Triton

        kernel = index_kernels.score_tokens
        if row_kernels.run_on(keys.device) and index_trial.gives_scores(kernel, score_by_torch, keys):
            return kernel
    return score_by_torch
