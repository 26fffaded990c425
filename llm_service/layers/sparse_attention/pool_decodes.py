"""The choice of a pool index for one token of each sequence, from metadata on the device only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llm_service.layers.sparse_attention.index import ROOM, IndexQuery, best
from llm_service.layers.sparse_attention.token_decodes import TokenDecodes


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDecodes(TokenDecodes):
    """Like `PoolBatch`, for such a step. `score` returns a score for each whole pool."""

    pool: int

    @property
    def sees_all(self) -> bool:
        """See `TokenDecodes`."""
        return self.metadata.longest // self.pool <= self.most // self.pool

    @property
    def members(self) -> Tensor:
        """See `PoolBatch`: of each sequence's last whole pool, or of its first tokens, int64 [s, pool]."""
        lengths = self.metadata.seq_lens.long().unsqueeze(1)
        first = (lengths // self.pool - 1).clamp(min=0) * self.pool
        within = torch.arange(self.pool, device=lengths.device)
        return self.listed((first + within).minimum((lengths - 1).clamp(min=0)))[0]

    @property
    def ends(self) -> Tensor:
        """See `PoolBatch`: the null slot if a sequence's last token does not end a pool."""
        lengths = self.metadata.seq_lens
        return self.written.masked_fill((lengths % self.pool != 0) | (lengths == 0), self.null_slot)

    def choose(self, asked: IndexQuery, cache: Tensor) -> list[Tensor]:
        """See `TokenDecodes`: int64 [s, most + pool − 1]; the last are behind the last whole pool."""
        lengths = self.metadata.seq_lens.long()
        whole, most = lengths // self.pool, self.most // self.pool
        scores = self.score(asked, cache, self.metadata)
        rows = max(1, ROOM // (8 * scores.shape[1]))
        pairs = zip(scores.split(rows), whole.split(rows), strict=True)
        chosen = torch.cat([best(*each, most) for each in pairs]).unsqueeze(2)
        within = torch.arange(self.pool, device=whole.device)
        pools = torch.where(chosen < 0, -1, chosen * self.pool + within).flatten(1)
        behind = (whole * self.pool).unsqueeze(1) + within[:-1]
        return self.listed(torch.cat([pools, torch.where(behind < lengths.unsqueeze(1), behind, -1)], dim=1))
