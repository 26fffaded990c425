"""How likely the tokens of a prompt were: the logits of many places, a slice at a time."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

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
            found.extend(entries(logits(places).double().log_softmax(-1), part, [asked.top] * len(part)))
        out.append(found)
    return out


def entries(values: Tensor, targets: Tensor, tops: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities float64 [m, vocabulary], targets int64 [m] → of each row the target's, and the highest."""
    chosen = values.gather(1, targets.unsqueeze(1)).squeeze(1).tolist()
    likeliest = values.topk(max(tops, default=0))
    found = zip(chosen, likeliest.indices.tolist(), likeliest.values.tolist(), tops, strict=True)
    return [
        TokenLogprobs(own, list(zip(tokens[:top], logprobs[:top], strict=True))) for own, tokens, logprobs, top in found
    ]
