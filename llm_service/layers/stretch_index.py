"""What an index chooses of the tokens before one, stretch by stretch, over a paged cache. A stretch is so many tokens
of a sequence, counted from its first; its key is made once all are there, and kept in the place of the last one's, so
that a sequence with the same blocks before it finds all of its own. A token sees the best stretches, and what is
behind the last whole one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from llm_service.layers.attention.backend import AttentionBackend, AttentionBatch, PagedChunk


@dataclass(frozen=True, slots=True)
class ChosenChunk:
    """A chunk at places [begin, end) of the batch, whose last token does not see all: it comes behind `context` tokens
    of its sequence, and `slots` int64 [context + count] are where all of these are."""

    begin: int
    end: int
    context: int
    slots: Tensor


@dataclass(frozen=True, slots=True)
class IndexBatch:
    """`written` int64 [n] is where the batch's tokens are, `members` int64 [m, stretch] where those of the stretches
    are that end among them. Of the chunks those in `chosen` do not see all; `rest` int64 [k] are the places of the
    others, which `dense` attends to."""

    stretch: int
    kept: int
    written: Tensor
    members: Tensor
    chosen: tuple[ChosenChunk, ...]
    rest: Tensor
    dense: AttentionBatch | None

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, asked: Tensor, keys: Tensor, scale: float
    ) -> Tensor:
        """As `AttentionBatch.attend`, where some chunks do not see all: `asked` [n, index heads, dim] are the index's
        queries, `keys` [blocks + 1, block_size, dim or more] its own cache, whose stretches' keys are there."""
        out = query.new_empty(query.shape)
        if self.dense is not None:
            attended = self.dense.attend(query[self.rest], key[self.rest], value[self.rest], cache)
            out[self.rest] = attended.view(-1, *query.shape[1:])
        cached_keys, cached_values = cache.flatten(1, 2)
        flat = keys.flatten(0, 1)
        for chunk in self.chosen:
            here, new = slice(chunk.begin, chunk.end), chunk.slots[chunk.context :]
            cached_keys[new], cached_values[new] = key[here].to(cache.dtype), value[here].to(cache.dtype)
            ends = chunk.slots[self.stretch - 1 :: self.stretch]
            stretches = flat[ends, : asked.shape[-1]]
            seen = self.seen(asked[here], stretches, chunk.context)
            slots = chunk.slots
            mask: Tensor | None = seen
            if len(seen) == 1:  # few of many are read
                slots, mask = slots[seen[0]], None
            attended = functional.scaled_dot_product_attention(
                query[here].transpose(0, 1).unsqueeze(0),
                cached_keys[slots].to(query.dtype).transpose(0, 1).unsqueeze(0),
                cached_values[slots].to(query.dtype).transpose(0, 1).unsqueeze(0),
                attn_mask=mask,
                scale=scale,
                enable_gqa=True,
            )
            out[here] = attended.squeeze(0).transpose(0, 1)
        return out.flatten(1)

    def seen(self, asked: Tensor, stretches: Tensor, context: int) -> Tensor:
        """Which tokens of a sequence each of its next ones sees, bool [m, context + m]: queries [m, heads, dim] behind
        `context` tokens, keys of all whole stretches [s, dim]."""
        total, count = context + len(asked), len(asked)
        best = torch.zeros(count, len(stretches), dtype=torch.bool, device=asked.device)
        scores = scored(asked, stretches)
        for first, last, whole in self._alike(context, count):
            own = scores[first:last, :whole]
            best[first:last].scatter_(1, own.topk(min(self.kept, whole), dim=1).indices, value=True)
        places = torch.arange(total, device=asked.device)
        own_places = places[context:].unsqueeze(1)
        behind = (own_places + 1) // self.stretch * self.stretch  # the last whole stretch
        seen = (places >= behind) & (places <= own_places)
        whole_tokens = len(stretches) * self.stretch
        seen[:, :whole_tokens] |= best.repeat_interleave(self.stretch, dim=1)
        return seen

    def _alike(self, context: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Runs [first, last) of tokens behind which there are as many whole stretches, and how many: the best of these
        are found together, and as if each token were asked for alone."""
        ends = range(context // self.stretch * self.stretch + self.stretch - 1, context + count, self.stretch)
        cuts = sorted({0, *(max(0, end - context) for end in ends), count})
        for first, last in pairwise(cuts):
            whole = (context + first + 1) // self.stretch
            if whole:
                yield first, last, whole


def scored(asked: Tensor, stretches: Tensor) -> Tensor:
    """Queries [m, heads, dim], keys [s, dim] → float32 [m, s]: of each pair what heads find that is above 0."""
    products = torch.relu(asked.float() @ stretches.float().t())
    scores: Tensor = products.sum(dim=1) / asked.shape[-1] ** 0.5
    return scores


class PagedIndex:
    """Makes a step's batches; see `IndexBatch`. What sees all is computed by `attention`."""

    def __init__(
        self, stretch: int, kept: int, attention: AttentionBackend, block_size: int, device: torch.device
    ) -> None:
        self._stretch, self._kept = stretch, kept
        self._attention, self._block_size, self._device = attention, block_size, device

    def batch(self, chunks: Sequence[PagedChunk]) -> IndexBatch:
        """See `IndexBackend`."""
        written, members, chosen = list[np.ndarray](), list[np.ndarray](), list[ChosenChunk]()
        dense, rest, begin = list[PagedChunk](), list[np.ndarray](), 0
        for chunk in chunks:
            slots, end = slots_of(chunk, self._block_size), begin + chunk.count
            written.append(slots[chunk.context :])
            first, last = chunk.context // self._stretch, len(slots) // self._stretch
            members.append(slots[first * self._stretch : last * self._stretch].reshape(-1, self._stretch))
            if last > self._kept:
                chosen.append(ChosenChunk(begin, end, chunk.context, torch.from_numpy(slots).to(self._device)))
            else:
                dense.append(chunk)
                rest.append(np.arange(begin, end))
            begin = end

        def move(parts: list[np.ndarray], width: int = 0) -> Tensor:
            empty = np.empty((0, width) if width else 0, np.int64)
            return torch.from_numpy(np.concatenate([empty, *parts])).to(self._device)

        mixed = bool(chosen and dense)  # where all chunks see all, the layer has a batch of them
        return IndexBatch(
            self._stretch,
            self._kept,
            move(written),
            move(members, self._stretch),
            tuple(chosen),
            move(rest),
            self._attention.batch(dense) if mixed else None,
        )


def slots_of(chunk: PagedChunk, block_size: int) -> np.ndarray:
    """Where a sequence's first context + count tokens are, int64.

    >>> slots_of(PagedChunk(2, 3, [5, 1]), 4)
    array([20, 21, 22, 23,  4])
    """
    starts = np.asarray(chunk.blocks, np.int64)[:, None] * block_size
    every: np.ndarray = (starts + np.arange(block_size)).reshape(-1)
    return every[: chunk.context + chunk.count]
