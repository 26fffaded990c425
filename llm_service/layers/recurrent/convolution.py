"""Causal depthwise convolutions over a few tokens, by torch's operators: their states, and which tokens of a step
continue from which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.gpu.transfer import to_device
from llm_service.layers.cache_spec import Segment


@dataclass(frozen=True, slots=True)
class Steps:
    """Tokens computed one by one, each of another sequence: their `rows` int64 [s] in the batch, the `slots` int64 [s]
    of their states, and whether each is its sequence's first, bool [s]."""

    rows: Tensor
    slots: Tensor
    fresh: Tensor

    @classmethod
    def of(cls, rounds: Sequence[Sequence[Segment]], device: torch.device) -> list[Steps]:
        """Of rounds of segments of one token, all in one copy."""
        if not rounds:
            return []
        tables = [np.array([(each.begin, each.slot, each.fresh) for each in own], np.int64).T for own in rounds]
        return [cls(rows, slots, fresh.bool()) for rows, slots, fresh in to_device(tables, device)]

    def read(self, pool: Tensor) -> Tensor:
        """The states [s, …] of a pool [slots, …], zeros for sequences that begin, whose slots may contain NaNs."""
        states = pool[self.slots]
        return states.masked_fill_(self.fresh.view(-1, *[1] * (pool.dim() - 1)), 0)


def convolve_run(x: Tensor, before: Tensor, weight: Tensor, apart: int = 1) -> tuple[Tensor, Tensor]:
    """A run: x [m, channels] behind the tokens [channels, (width − 1) · apart], weight [channels, width], of tokens
    that are `apart` positions apart → [m, channels], and the last tokens, in the form of those before. Sums are
    float32."""
    count, every, by_place = len(x), torch.cat([before.t(), x]), weight.t().float().contiguous()
    total = every[:count].float() * by_place[0]
    for place in range(1, len(by_place)):
        first = place * apart
        total.addcmul_(every[first : first + count].float(), by_place[place])
    return total.to(x.dtype), every[count:].t()


def convolve_steps(x: Tensor, before: Tensor, weight: Tensor, apart: int = 1) -> tuple[Tensor, Tensor]:
    """The same for a token each of s sequences: x [s, channels], before [s, channels, (width − 1) · apart]."""
    every = torch.cat([before, x.unsqueeze(2)], dim=2)
    total = every[:, :, 0].float() * weight[:, 0].float()
    for place in range(1, weight.shape[1]):
        total.addcmul_(every[:, :, place * apart].float(), weight[:, place].float())
    return total.to(x.dtype), every[:, :, 1:]
