"""One token from each row of logits, as its `Draw` says; all rows of a step together.

The order is transformers' own: penalties, bias, bans (`adjust`), temperature, top-k, top-p, min-p (`truncate`); then
the draw by inverse CDF over the vocabulary at the plan's `uniform`, so that a token depends on its logits and its seed
and on nothing else in the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from llm_service.plan import Draw, StepResult, TokenLogprobs
from llm_service.worker.adjust import adjust
from llm_service.worker.scores import entries
from llm_service.worker.truncate import least

_ROWS_ON_GPU, _ROWS_ON_CPU = 64, 8
"""Rows that are drawn from at once: with 150 000 words each takes about 5 MB, which a CPU's cache should hold."""


def sample(logits: Tensor, draws: Sequence[Draw]) -> StepResult:
    """float32 logits [len(draws), vocabulary] → one token for each draw, with log-probabilities where asked for."""
    tokens = logits.argmax(-1)
    altered = [index for index, draw in enumerate(draws) if not draw.plain]
    for part in _parts(altered, logits.device):
        at = torch.tensor(part, device=logits.device)
        tokens[at] = _choose(logits[at], [draws[index] for index in part])
    return StepResult(tokens.tolist(), _logprobs(logits, draws, tokens))


def _choose(rows: Tensor, draws: Sequence[Draw]) -> Tensor:
    """rows float32 [k, vocabulary], which are overwritten → int64 [k]."""
    adjust(rows, draws)
    tokens = rows.argmax(-1)
    drawn = [index for index, draw in enumerate(draws) if draw.temperature > 0.0]
    if drawn:
        at = torch.tensor(drawn, device=rows.device)
        tokens[at] = _draw(rows[at], [draws[index] for index in drawn])
    return tokens


def _draw(rows: Tensor, draws: Sequence[Draw]) -> Tensor:
    """rows float32 [k, vocabulary] → int64 [k]."""
    asked = [(draw.temperature, draw.uniform) for draw in draws]
    temperature, uniform = torch.tensor(asked, dtype=torch.float64, device=rows.device).T.unsqueeze(-1)
    # From the highest down, in float64: a temperature near zero makes the others vanish, not overflow.
    values = rows.double().sub_(rows.amax(-1, keepdim=True)).div_(temperature)
    weights = values.exp()
    weights.masked_fill_(values < least(values, weights, draws).unsqueeze(-1), 0.0)
    total = weights.cumsum(-1)
    whole = total[:, -1:].contiguous()
    # The first place at which the sum is above the share; where rounding leaves none, the last one that adds to it.
    place = torch.searchsorted(total, uniform * whole, right=True)
    last = torch.searchsorted(total, whole).clamp_(max=rows.shape[1] - 1)  # a row that is not a number has none
    return torch.minimum(place, last).squeeze(-1)


def _logprobs(logits: Tensor, draws: Sequence[Draw], tokens: Tensor) -> list[TokenLogprobs | None]:
    """Of the model's own distribution: untouched logits at temperature 1."""
    found: list[TokenLogprobs | None] = [None] * len(draws)
    asking = [index for index, draw in enumerate(draws) if draw.logprobs >= 0]
    for part in _parts(asking, logits.device):
        at = torch.tensor(part, device=logits.device)
        values = logits[at].double().log_softmax(-1)
        for index, entry in zip(part, entries(values, tokens[at], [draws[k].logprobs for k in part]), strict=True):
            found[index] = entry
    return found


def _parts(indices: list[int], device: torch.device) -> Iterator[list[int]]:
    size = _ROWS_ON_CPU if device.type == "cpu" else _ROWS_ON_GPU
    for first in range(0, len(indices), size):
        yield indices[first : first + size]
