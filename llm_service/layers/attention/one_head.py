"""Attention of many heads' queries to one head's keys, whose first numbers are their values, by torch's operators: two
products in which all heads' queries are rows. Torch's own operator would copy the keys for each head."""

from __future__ import annotations

import torch
from torch import Tensor

from llm_service.layers.attention.scored import softmax_with_sinks

_ROOM = 32 << 20
"""Bytes of scores at once."""


def attend_to_one(
    out: Tensor,
    query: Tensor,
    keys: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Fills out [n, heads, value_dim] for queries [n, heads, head_dim] and keys [m, head_dim]; `mask` bool [n, m] says
    what is seen, None: everything. Products are multiplied by `scale`, and scores soft-capped by `softcap`, if given;
    `sinks` float32 [heads] are as in `attend_by_scores`. Computed in float32."""
    query, keys = query.float(), keys.float()
    heads, values = query.shape[1], keys[:, : out.shape[2]]
    tokens = max(1, _ROOM // (4 * heads * len(keys)))
    for begin in range(0, len(query), tokens):
        here = slice(begin, begin + tokens)
        scores = (query[here].reshape(-1, query.shape[2]) @ keys.t()).mul_(scale)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        if mask is not None:
            scores.view(-1, heads, len(keys)).masked_fill_(~mask[here].unsqueeze(1), -torch.inf)
        own = None if sinks is None else sinks.repeat(len(scores) // heads).unsqueeze(1)
        out[here] = (softmax_with_sinks(scores, own) @ values).view(-1, heads, out.shape[2])
