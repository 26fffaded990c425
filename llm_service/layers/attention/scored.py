"""Attention with soft caps or sinks, which torch's own operator does not support: scores are computed first."""

from __future__ import annotations

import torch
from torch import Tensor

_ROOM = 32 << 20
"""Bytes of scores at once."""


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Scores float32 […, m] → how much of what attends each gets, as large. `sinks` […, 1] are scores of something that
    nobody attends to, which gets the rest.

    >>> softmax_with_sinks(torch.tensor([[0.0, 0.0]]), torch.tensor([[2.0]]).log()).tolist()
    [[0.25, 0.25]]
    """
    if sinks is None:
        return scores.softmax(-1)
    highest = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    weights = (scores - highest).exp_()
    return weights.div_(weights.sum(-1, keepdim=True) + (sinks - highest).exp())


def attend_by_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """query [n, heads, width]; key [m, kv_heads, width], value [m, kv_heads, depth]; `mask` bool [n, m] says what is
    seen, None: everything → [n, heads, depth], computed in float32. Products are multiplied by `scale`; scores are
    soft-capped by `softcap` · tanh, as in Gemma 2. `sinks` [heads] are scores without values."""
    kv_heads, total = key.shape[1], len(key)
    keys, values = key.float().permute(1, 2, 0), value.float().transpose(0, 1)
    out = query.new_empty(*query.shape[:2], value.shape[2])
    rows = max(1, _ROOM // (4 * query.shape[1] * total))
    for begin in range(0, len(query), rows):
        here = slice(begin, begin + rows)
        grouped = query[here].float().unflatten(1, (kv_heads, -1)).transpose(0, 1)  # [kv_heads, n, group, width]
        scores = (grouped.flatten(1, 2) @ keys).mul_(scale)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        scores = scores.unflatten(1, grouped.shape[1:3])  # [kv_heads, n, group, m]
        if mask is not None:
            scores.masked_fill_(~mask[here].unsqueeze(1), -torch.inf)
        if sinks is not None:
            own = sinks.float().view(kv_heads, 1, -1, 1).expand(-1, scores.shape[1], -1, -1)
            scores = torch.cat([scores, own], dim=3)
        weights = scores.softmax(3)[..., :total]
        mixed = (weights.flatten(1, 2) @ values).unflatten(1, grouped.shape[1:3])
        out[here] = mixed.transpose(0, 1).flatten(1, 2)
    return out
