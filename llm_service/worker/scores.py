"""How likely the tokens of a prompt were: the logits of many places, a slice at a time."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import torch
from torch import Tensor

from llm_service.plan import Score, TokenLogprobs

_PLACES = 128
"""Places whose logits are held at once: with 150 000 words, about 80 MB of float32."""


def score(hidden: Tensor, scores: list[Score], logits: Callable[[Tensor], Tensor]) -> list[list[TokenLogprobs]]:
    """hidden [n, hidden] of a whole batch → one entry for each target of each score.

    `logits` is [m, hidden] → float32 [m, vocabulary]. Where a group computes it together, every rank must come here.
    """
    out: list[list[TokenLogprobs]] = []
    for asked in scores:
        targets = torch.tensor(array("i", asked.targets).tolist(), device=hidden.device)
        found: list[TokenLogprobs] = []
        for first in range(0, len(targets), _PLACES):
            part = targets[first : first + _PLACES]
            places = hidden[asked.at + first : asked.at + first + len(part)]
            found.extend(_entries(logits(places).double().log_softmax(-1), part, asked.top))
        out.append(found)
    return out


def _entries(values: Tensor, targets: Tensor, top: int) -> list[TokenLogprobs]:
    """values float64 [m, vocabulary], targets int64 [m] → the target's value and the `top` highest of each row."""
    chosen = values.gather(1, targets.unsqueeze(1)).squeeze(1).tolist()
    likeliest = values.topk(top)
    pairs = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
    return [
        TokenLogprobs(own, list(zip(tokens, logprobs, strict=True)))
        for own, (tokens, logprobs) in zip(chosen, pairs, strict=True)
    ]
