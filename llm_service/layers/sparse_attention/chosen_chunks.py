"""Divides the chunks of a step by whether they see their whole sequence, if layers choose by an index what they see,
and describes the choice of the others over a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.gpu.transfer import to_device
from llm_service.layers.attention.backend import AttentionBackend, AttentionBatch, PagedChunk
from llm_service.layers.sparse_attention.index import IndexQuery, choose


@dataclass(frozen=True, slots=True)
class ChosenChunk:
    """A chunk at batch positions [begin, end) whose last token does not see everything; `context` tokens of its
    sequence precede it, and `slots` int64 [context + count] are those of all."""

    begin: int
    end: int
    context: int
    slots: Tensor


@dataclass(frozen=True, slots=True)
class ChunksApart:
    """`written` int64 [n] are the slots of a step's tokens. Chunks in `chosen` do not see everything; `rest` int64 [k]
    are the positions of the others, `near`."""

    written: Tensor
    chosen: tuple[ChosenChunk, ...]
    rest: Tensor
    near: tuple[PagedChunk, ...]


def apart(
    chunks: Sequence[PagedChunk], reach: int, block_size: int, device: torch.device, *more: np.ndarray
) -> tuple[ChunksApart, list[Tensor]]:
    """Divides chunks of sequences, of which those of up to `reach` tokens are seen whole. If all are, `near` and `rest`
    are empty: the whole step is computed as usual. `more` goes to the device in the same copy."""
    every = [slots_of(chunk, block_size) for chunk in chunks]
    ends = np.cumsum([chunk.count for chunk in chunks])
    far = [number for number, slots in enumerate(every) if len(slots) > reach]
    near = [number for number in range(len(chunks)) if number not in far] if far else []
    written, rest, *others = to_device(
        [
            np.concatenate([own[chunk.context :] for own, chunk in zip(every, chunks, strict=True)]),
            np.concatenate([np.arange(0), *(np.arange(ends[at] - chunks[at].count, ends[at]) for at in near)]),
            *(every[number] for number in far),
            *more,
        ],
        device,
    )
    chosen = tuple(
        ChosenChunk(int(ends[at]) - chunks[at].count, int(ends[at]), chunks[at].context, own)
        for at, own in zip(far, others[: len(far)], strict=True)
    )
    return ChunksApart(written, chosen, rest, tuple(chunks[at] for at in near)), others[len(far) :]


def slots_of(chunk: PagedChunk, block_size: int) -> np.ndarray:
    """Where a sequence's first context + count tokens are, int64.

    >>> slots_of(PagedChunk(2, 3, [5, 1]), 4)
    array([20, 21, 22, 23,  4])
    """
    starts = np.asarray(chunk.blocks, np.int64)[:, None] * block_size
    every: np.ndarray = (starts + np.arange(block_size)).reshape(-1)
    return every[: chunk.context + chunk.count]


@dataclass(frozen=True, slots=True)
class ChosenBatch:
    """`written` int64 [n] are the slots of a step's tokens. Chunks in `chosen` do not see everything; `rest` int64 [k]
    are the positions of the others, which `dense` computes."""

    written: Tensor
    chosen: tuple[ChosenChunk, ...]
    rest: Tensor
    dense: AttentionBatch | None

    @property
    def sees_all(self) -> bool:
        """Whether every token of the step does, so that the layer's own batch attends."""
        return not self.chosen

    def keep(self, kept: Tensor, cache: Tensor) -> None:
        """Writes keys [n, head_dim] into one layer's cache [blocks + 1, block_size, head_dim]."""
        cache.flatten(0, 1)[self.written] = kept.to(cache.dtype)

    def choose(self, asked: IndexQuery, cache: Tensor) -> list[Tensor]:
        """Of each chunk that does not see all the places that its tokens see, int64 [count, k], -1 where there are no
        more; keys are in the cache."""
        made = list[Tensor]()
        for chunk in self.chosen:
            chosen = choose(asked, slice(chunk.begin, chunk.end), chunk.slots, cache)
            assert chosen is not None, "these are longer than what is seen whole"
            made.append(chosen)
        return made


class ChosenBackend:
    """Makes a step's batches. Sequences of up to `reach` tokens are seen whole; what sees all is computed by
    `attention`."""

    def __init__(self, reach: int, attention: AttentionBackend, block_size: int, device: torch.device) -> None:
        self._reach, self._attention, self._block_size, self._device = reach, attention, block_size, device

    def batch(self, chunks: Sequence[PagedChunk]) -> ChosenBatch:
        """See `IndexBackend`."""
        found, _ = apart(chunks, self._reach, self._block_size, self._device)
        dense = self._attention.batch(found.near) if found.near else None
        return ChosenBatch(found.written, found.chosen, found.rest, dense)
