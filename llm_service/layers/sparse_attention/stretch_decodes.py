"""Stretches that an index chooses for one token of each sequence, from metadata on the device alone, so that it can be
captured in a graph: of any sequence as much is read as of one that does not see all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llm_service.layers.attention.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class StretchDecodes:
    """Like `StretchBatch`, for such a step, over metadata that can be refilled. `null_slot` is that of padding."""

    stretch: int
    kept: int
    block_size: int
    null_slot: int
    metadata: AttentionMetadata

    @property
    def sees_all(self) -> bool:
        """Whether no sequence may be so long that a token does not."""
        return self.metadata.longest // self.stretch <= self.kept

    @property
    def written(self) -> Tensor:
        """See `StretchBatch`."""
        return self.metadata.slot_mapping.long()

    @property
    def members(self) -> Tensor:
        """See `StretchBatch`: of each sequence, int64 [s, stretch]."""
        first = (self._lengths // self.stretch - 1).clamp(min=0) * self.stretch
        within = torch.arange(self.stretch, device=first.device)
        return self._slots((first.unsqueeze(1) + within).minimum(self._last))

    @property
    def ends(self) -> Tensor:
        """See `StretchBatch`: the null slot if a sequence's last token does not end a stretch."""
        lengths = self._lengths
        return self.written.masked_fill((lengths % self.stretch != 0) | (lengths == 0), self.null_slot)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, asked: Tensor, keys: Tensor, scale: float
    ) -> Tensor:
        """See `StretchBatch`."""
        cached_keys, cached_values = cache.flatten(1, 2)
        cached_keys[self.written], cached_values[self.written] = key.to(cache.dtype), value.to(cache.dtype)
        slots, seen = self._seen(asked, keys.flatten(0, 1))
        groups = query.unflatten(1, (key.shape[1], -1))  # [s, kv_heads, group, dim]
        near, far = (each[slots].to(query.dtype).transpose(1, 2) for each in (cached_keys, cached_values))
        scores = (groups @ near.transpose(2, 3)).float() * scale
        shares = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
        out: Tensor = shares.to(query.dtype) @ far
        return out.flatten(1)

    def _seen(self, asked: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Slots int64 [s, t] that each token sees, the best stretches followed by what is behind the last, and which of
        them are valid."""
        whole, most = self._lengths.unsqueeze(1) // self.stretch, self.metadata.longest // self.stretch
        numbers = torch.arange(most, device=whole.device)
        ends = self._slots(((numbers + 1) * self.stretch - 1).minimum(self._last))
        products = torch.relu(asked.float() @ keys[ends, : asked.shape[-1]].float().transpose(1, 2))
        scores = products.sum(1).masked_fill(numbers >= whole, -torch.inf)
        best = scores.topk(self.kept, dim=1).indices
        counted = torch.arange(self.kept + 1, device=whole.device)
        best = torch.where(whole > self.kept, best.sort(dim=1).values, counted[:-1])  # few are seen one by one
        chosen = whole.clamp(max=self.kept)
        stretches = torch.where(
            counted < chosen, torch.cat([best, whole], dim=1), whole + counted - chosen
        )  # a stretch that is not whole is behind those that are chosen
        places = (stretches.unsqueeze(2) * self.stretch + torch.arange(self.stretch, device=whole.device)).flatten(1)
        return self._slots(places.minimum(self._last)), places <= self._last

    def _slots(self, places: Tensor) -> Tensor:
        """The slots of tokens [s, t] of each sequence."""
        table = self.metadata.block_table
        blocks = table.gather(1, places // self.block_size).long()
        slots = blocks * self.block_size + places % self.block_size
        return slots.masked_fill(self._lengths.unsqueeze(1) == 0, self.null_slot)

    @property
    def _lengths(self) -> Tensor:
        return self.metadata.seq_lens.long()

    @property
    def _last(self) -> Tensor:
        """The last token of each sequence, [s, 1]."""
        return (self._lengths - 1).clamp(min=0).unsqueeze(1)
