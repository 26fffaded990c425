"""Top-k, top-p and min-p as one bound for each row: what lies below it cannot be drawn.

As in transformers, each counts what the one before it left, and tokens that are as likely as the last one kept stay.
A bound needs the highest values alone, in order; a whole vocabulary is sorted only where a row is so flat that these do
not reach.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llm_service.plan import Draw

_REACH = (512, 8192)
"""Of how many values the order is found at first, and then."""


def least(values: Tensor, weights: Tensor, draws: Sequence[Draw]) -> Tensor:
    """values float64 [k, vocabulary], at most 0 and 0 once in each row, and their exponentials → the bounds [k]."""
    bounds = torch.tensor([draw.min_p for draw in draws], dtype=torch.float64, device=values.device).log_()
    cut = [index for index, draw in enumerate(draws) if draw.top_p < 1.0 or 0 < draw.top_k < values.shape[1]]
    if cut:
        at = torch.tensor(cut, device=values.device)
        bounds[at] = torch.maximum(bounds[at], _cut(values[at], weights[at].sum(-1), [draws[index] for index in cut]))
    return bounds


def _cut(values: Tensor, mass: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The value of the last token that top-k and top-p keep in each row; `mass` [m] is the sum of all exponentials."""
    vocabulary = values.shape[1]
    asked = [(draw.top_k or vocabulary, draw.top_p) for draw in draws]
    top_k, top_p = torch.tensor(asked, dtype=torch.float64, device=values.device).T.unsqueeze(-1)
    bounds, left = torch.empty_like(mass), torch.arange(len(draws), device=values.device)
    for reach in (*(reach for reach in _REACH if reach < vocabulary), vocabulary):
        some = values[left]
        head = some.topk(reach).values if reach < vocabulary else some.sort(descending=True).values
        kept = _kept(head, mass[left].unsqueeze(-1), top_k[left], top_p[left], vocabulary)
        bounds[left] = head.gather(1, kept - 1).squeeze(1)
        left = left[(kept == reach).squeeze(1)]
        if reach == vocabulary or not len(left):
            break
    return bounds


def _kept(head: Tensor, mass: Tensor, top_k: Tensor, top_p: Tensor, vocabulary: int) -> Tensor:
    """How many of the highest values, in descending order [m, n], stay: int64 [m, 1]; n where more might."""
    weights, n = head.exp(), head.shape[1]
    last = head.gather(1, top_k.long().clamp_(max=n) - 1)
    within = (head >= last) | (top_k > n)
    mass = torch.where(top_k > n, mass, weights.masked_fill(~within, 0.0).sum(-1, keepdim=True))
    before = weights.cumsum(-1) - weights
    kept = (within & (before < top_p * mass)).sum(-1, keepdim=True).clamp_(min=1)
    return torch.where((top_k > n) & (top_k < vocabulary), n, kept)  # what top-k leaves in all is not known yet
