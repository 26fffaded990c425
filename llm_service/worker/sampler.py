"""One token from each row of logits, as its `Draw` says.

The order is transformers' own: penalties, bias, bans, temperature, top-k, top-p, min-p; then the draw by inverse CDF at
the plan's `uniform`, so that a token depends on its logits and its seed and on nothing else in the batch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from llm_service.plan import Draw, StepResult, TokenLogprobs


def sample(logits: Tensor, draws: list[Draw]) -> StepResult:
    """float32 logits [len(draws), vocabulary] → one token for each draw, with log-probabilities where asked for."""
    if all(draw.plain and draw.logprobs < 0 for draw in draws):
        return StepResult(logits.argmax(-1).tolist(), [None] * len(draws))
    tokens = [
        int(row.argmax()) if draw.plain else _choose(row.clone(), draw) for row, draw in zip(logits, draws, strict=True)
    ]
    return StepResult(
        tokens, [_logprobs(row, draw, token) for row, draw, token in zip(logits, draws, tokens, strict=True)]
    )


def _choose(row: Tensor, draw: Draw) -> int:
    """row float32 [vocabulary], which is overwritten."""
    _penalise(row, draw)
    if draw.logit_bias:
        row[list(draw.logit_bias)] += torch.tensor(list(draw.logit_bias.values()), device=row.device)
    if draw.allowed:
        bits = np.unpackbits(np.frombuffer(draw.allowed, np.uint8), count=len(row), bitorder="little")
        row[torch.from_numpy(bits).to(row.device) == 0] = -torch.inf
    if draw.banned:
        row[list(draw.banned)] = -torch.inf
    if draw.temperature == 0.0:
        return int(row.argmax())
    values, order = row.sort(descending=True, stable=True)
    # From the highest down, in float64: a temperature near zero makes the others vanish, not overflow.
    values = (values.double() - values[0]) / draw.temperature
    probabilities = _truncated(values, draw)
    total = probabilities.cumsum(-1)
    place = torch.searchsorted(total, draw.uniform * total[-1], right=True)
    last = int(torch.count_nonzero(probabilities)) - 1
    return int(order[min(int(place), last)])


def _penalise(row: Tensor, draw: Draw) -> None:
    if not draw.history:
        return
    history = torch.frombuffer(bytearray(draw.history), dtype=torch.int32).long().to(row.device)
    seen = history.unique()
    scores = row[seen]
    row[seen] = torch.where(scores < 0, scores * draw.repetition_penalty, scores / draw.repetition_penalty)
    output, counts = history[draw.output_from :].unique(return_counts=True)
    row[output] -= draw.presence_penalty + draw.frequency_penalty * counts


def _truncated(values: Tensor, draw: Draw) -> Tensor:
    """Sorted float64 logits → probabilities with the tail set to zero; the likeliest token always stays."""
    if draw.top_k:
        values[draw.top_k :] = -torch.inf
    probabilities = values.softmax(-1)
    if draw.top_p < 1.0:
        before = probabilities.cumsum(-1) - probabilities
        probabilities[1:][before[1:] >= draw.top_p] = 0.0
    if draw.min_p > 0.0:
        probabilities[1:][probabilities[1:] < draw.min_p * probabilities[0]] = 0.0
    return probabilities


def _logprobs(row: Tensor, draw: Draw, token: int) -> TokenLogprobs | None:
    """Of the model's own distribution: untouched logits at temperature 1."""
    if draw.logprobs < 0:
        return None
    values = row.double().log_softmax(-1)
    top = values.topk(draw.logprobs) if draw.logprobs else None
    likeliest = [] if top is None else list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return TokenLogprobs(float(values[token]), likeliest)
