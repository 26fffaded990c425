"""The choice of a stretch index over a paged cache. A stretch is so many tokens of a sequence, counted from its first;
its key is computed once all are there, and kept at the last one's place, so that a sequence with the same cached blocks
finds it. A token sees the best stretches, and everything behind the last whole one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from llm_service.layers.attention.backend import AttentionBackend, AttentionBatch, PagedChunk
from llm_service.layers.attention.metadata import AttentionMetadata
from llm_service.layers.cpu import selection
from llm_service.layers.sparse_attention.chosen_chunks import ChosenChunk, apart, slots_of
from llm_service.layers.sparse_attention.index import ROOM, mask_of
from llm_service.layers.sparse_attention.stretch_decodes import StretchDecodes


@dataclass(frozen=True, slots=True)
class Listed:
    """Tokens at `places` int64 [m] of the batch, each with a list of the units that it sees, int32 [m, w], the last of
    which may be partial, and the number of tokens in them, int32 [m]."""

    places: Tensor
    table: Tensor
    lengths: Tensor


AttendAlong = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
"""Queries [m, heads, dim], a layer's cache of keys and values, a table and lengths as in `Listed`, and the factor of
products → [m, heads, dim]."""
_MANY = 2
"""A chunk reads so many times as many tokens together as it takes to read each token's own in the same time."""


@dataclass(frozen=True, slots=True)
class StretchBatch:
    """`written` int64 [n] are the slots of the batch's tokens, `members` int64 [m, stretch] those of the stretches that
    end among them. Chunks in `chosen` do not see everything; `rest` int64 [k] are the positions of the others, which
    `dense` computes. `along` attends along lists of units of so many consecutive tokens."""

    stretch: int
    kept: int
    written: Tensor
    members: Tensor
    chosen: tuple[ChosenChunk, ...]
    rest: Tensor
    dense: AttentionBatch | None
    unit: int = 1
    along: AttendAlong | None = None

    @property
    def sees_all(self) -> bool:
        """Whether every token of the batch does, so that the layer's own batch attends."""
        return not self.chosen

    @property
    def ends(self) -> Tensor:
        """The slots of stretches' keys, int64 [m]."""
        return self.members[:, -1]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, asked: Tensor, keys: Tensor, scale: float
    ) -> Tensor:
        """As `AttentionBatch.attend`, if some chunks do not see everything: `asked` [n, index heads, dim] are the
        index's queries, `keys` [blocks + 1, block_size, dim or more] its own cache, which has the stretches' keys."""
        out = query.new_empty(query.shape)
        if self.dense is not None:
            attended = self.dense.attend(query[self.rest], key[self.rest], value[self.rest], cache)
            out[self.rest] = attended.view(-1, *query.shape[1:])
        cached_keys, cached_values = cache.flatten(1, 2)
        flat = keys.flatten(0, 1)
        lists = list[Listed]()
        for chunk in self.chosen:
            here, new = slice(chunk.begin, chunk.end), chunk.slots[chunk.context :]
            cached_keys[new], cached_values[new] = key[here].to(cache.dtype), value[here].to(cache.dtype)
            stretches = flat[chunk.slots[self.stretch - 1 :: self.stretch], : asked.shape[-1]]
            best = self.best(asked[here], stretches, chunk.context)
            if self.along is not None and self._reads_few(chunk):
                lists.append(self._listed(best, chunk))
                continue
            every = cached_keys[chunk.slots], cached_values[chunk.slots]
            self._attend_by_mask(out[here], query[here], *every, best, scale)
        if lists:
            assert self.along is not None, "what attends along lists"
            places = torch.cat([each.places for each in lists])
            table, lengths = torch.cat([each.table for each in lists]), torch.cat([each.lengths for each in lists])
            out[places] = self.along(query[places], cache, table, lengths, scale)
        return out.flatten(1)

    def best(self, asked: Tensor, stretches: Tensor, context: int) -> Tensor:
        """The stretches that each of a sequence's next tokens sees, except the last partial one: int64 [m, kept],
        ordered by score, and −1 for none. Queries are [m, heads, dim] behind `context` tokens, keys of all whole
        stretches [s, dim]."""
        best = torch.full((len(asked), self.kept), -1, dtype=torch.int64, device=asked.device)
        for first, last, whole in self._alike(context, len(asked)):
            count = min(self.kept, whole)
            best[first:last, :count] = scored(asked[first:last], stretches[:whole]).topk(count, dim=1).indices
        return best

    def _attend_by_mask(
        self, out: Tensor, query: Tensor, keys: Tensor, values: Tensor, best: Tensor, scale: float
    ) -> None:
        """Fills out [m, heads, dim] for queries [m, heads, dim], the last of so many tokens, whose keys and values are
        [total, kv_heads, dim]; so many at a time as there is `ROOM` for."""
        near, far = (each.to(query.dtype).transpose(0, 1) for each in (keys, values))
        total, context = len(keys), len(keys) - len(query)
        rows = max(1, ROOM // (4 * query.shape[1] * total))
        for begin in range(0, len(query), rows):
            part = slice(begin, begin + rows)
            seen, own = self.seen(best[part], context + begin, total), query[part].transpose(0, 1)
            attended = functional.scaled_dot_product_attention(
                own, near, far, attn_mask=seen, scale=scale, enable_gqa=True
            )
            out[part] = attended.transpose(0, 1)

    def seen(self, best: Tensor, context: int, total: int) -> Tensor:
        """The same as tokens, including those behind the last whole stretch: bool [m, total], for m tokens behind
        `context` others, of `total` in all."""
        whole = total // self.stretch
        places = torch.arange(total, device=best.device)
        own = places[context : context + len(best)].unsqueeze(1)
        seen = (places >= (own + 1) // self.stretch * self.stretch) & (places <= own)
        seen[:, : whole * self.stretch] |= mask_of(best, whole).repeat_interleave(self.stretch, dim=1)
        return seen

    def _reads_few(self, chunk: ChosenChunk) -> bool:
        """Whether all tokens of a chunk see as many stretches as are kept, and reading each one's is cheaper than
        reading all once."""
        enough = (chunk.context + 1) // self.stretch >= self.kept
        return enough and (chunk.end - chunk.begin == 1 or len(chunk.slots) > _MANY * self.kept * self.stretch)

    def _listed(self, best: Tensor, chunk: ChosenChunk) -> Listed:
        """The input of `along` for a chunk whose tokens all see as many stretches as are kept."""
        each = self.stretch // self.unit
        units = chunk.slots[:: self.unit] // self.unit
        own = torch.arange(chunk.context, len(chunk.slots))
        within = torch.arange(each)
        chosen = (best.sort(dim=1).values.unsqueeze(2) * each + within).flatten(1)
        whole = (own + 1) // self.stretch
        behind = (whole.unsqueeze(1) * each + within).clamp(max=len(units) - 1)
        lengths = self.kept * self.stretch + own + 1 - whole * self.stretch
        places = torch.arange(chunk.begin, chunk.end)
        return Listed(places, units[torch.cat([chosen, behind], dim=1)].int(), lengths.int())

    def _alike(self, context: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Runs [first, last) of tokens that follow equally many whole stretches, and this number: their best ones are
        found together, with the same result as for each alone."""
        ends = range(context // self.stretch * self.stretch + self.stretch - 1, context + count, self.stretch)
        cuts = sorted({0, *(max(0, end - context) for end in ends), count})
        for first, last in pairwise(cuts):
            whole = (context + first + 1) // self.stretch
            if whole:
                yield first, last, whole


def scored(asked: Tensor, stretches: Tensor) -> Tensor:
    """Queries [m, heads, dim], keys [s, dim] → float32 [m, s]: the sum over heads of positive products."""
    products = torch.relu(asked.float() @ stretches.float().t())
    scores: Tensor = products.sum(dim=1) / asked.shape[-1] ** 0.5
    return scores


class StretchIndexBackend:
    """Makes a step's batches; see `StretchBatch`. `attention` computes chunks that see everything."""

    def __init__(
        self,
        stretch: int,
        kept: int,
        attention: AttentionBackend,
        blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._stretch, self._kept = stretch, kept
        self._attention, self._block_size, self._device = attention, block_size, device
        self._null_slot = blocks * block_size
        self._unit = math.gcd(stretch, block_size)

    def batch(self, chunks: Sequence[PagedChunk]) -> StretchBatch:
        """See `IndexBackend`."""
        every = [slots_of(chunk, self._block_size) for chunk in chunks]
        ends = [len(slots) // self._stretch * self._stretch for slots in every]
        begun = [chunk.context // self._stretch * self._stretch for chunk in chunks]
        new = np.concatenate([slots[first:last] for slots, first, last in zip(every, begun, ends, strict=True)])
        reach = (self._kept + 1) * self._stretch - 1
        found, (members,) = apart(chunks, reach, self._block_size, self._device, new)
        return StretchBatch(
            self._stretch,
            self._kept,
            found.written,
            members.view(-1, self._stretch),
            found.chosen,
            found.rest,
            self._attention.batch(found.near) if found.near else None,
            self._unit,
            self._along(),
        )

    def over(self, metadata: AttentionMetadata) -> StretchDecodes:
        """See `StableIndexBackend`."""
        return StretchDecodes(self._stretch, self._kept, self._block_size, self._null_slot, metadata)

    def _along(self) -> AttendAlong | None:
        if self._attention.name != "numba" or not selection.is_numba():
            return None
        from llm_service.layers.cpu import listed_attention  # numba takes its time

        return partial(listed_attention.attend, unit=self._unit)
