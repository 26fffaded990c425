"""What requests want changed about their logits before anything is chosen: penalties, bias, a grammar's mask, bans."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from llm_service.plan import Draw


def adjust(rows: Tensor, draws: Sequence[Draw]) -> None:
    """Changes rows float32 [k, vocabulary] in place, each as its draw says."""
    _penalise(rows, draws)
    _add_bias(rows, draws)
    _mask(rows, draws)
    _ban(rows, draws)


def _penalise(rows: Tensor, draws: Sequence[Draw]) -> None:
    """Repetition counts tokens of prompt and output alike, presence and frequency those of the output alone."""
    if not any(draw.prompt or draw.output for draw in draws):
        return
    device, vocabulary = rows.device, rows.shape[1]
    flat = rows.view(-1)
    asked = _cells([draw.prompt for draw in draws], vocabulary).to(device)
    said, counts = _cells([draw.output for draw in draws], vocabulary).to(device).unique(return_counts=True)
    rates = [(draw.repetition_penalty, draw.presence_penalty, draw.frequency_penalty) for draw in draws]
    repetition, presence, frequency = torch.tensor(rates, device=device).T
    seen = torch.cat([asked, said])  # what is in both gets the same number twice
    number = torch.finfo(rows.dtype)
    scores, rate = flat[seen], repetition[seen // vocabulary].clamp_(min=number.tiny)
    flat[seen] = torch.where(scores < 0, scores * rate, scores / rate).clamp_(max=number.max)
    flat[said] -= presence[said // vocabulary] + frequency[said // vocabulary] * counts


def _cells(tokens: Sequence[bytes], vocabulary: int) -> Tensor:
    """int64 [tokens]: where in the flattened rows these tokens, int32 as bytes, stand; one entry for each row."""
    cells = [np.frombuffer(some, np.int32).astype(np.int64) + row * vocabulary for row, some in enumerate(tokens)]
    return torch.from_numpy(np.concatenate(cells))


def _add_bias(rows: Tensor, draws: Sequence[Draw]) -> None:
    biased = [(index, token, value) for index, draw in enumerate(draws) for token, value in draw.logit_bias.items()]
    if biased:
        row, token, value = zip(*biased, strict=True)
        rows[list(row), list(token)] += torch.tensor(value, device=rows.device)


def _mask(rows: Tensor, draws: Sequence[Draw]) -> None:
    """A grammar's mask has a bit for each token, little-endian."""
    masked = [index for index, draw in enumerate(draws) if draw.allowed]
    if not masked:
        return
    packed = torch.frombuffer(bytearray(b"".join(draws[index].allowed for index in masked)), dtype=torch.uint8)
    octets = packed.view(len(masked), -1, 1).to(rows.device)
    bits = octets.bitwise_right_shift(torch.arange(8, dtype=torch.uint8, device=rows.device)).bitwise_and_(1)
    at = torch.tensor(masked, device=rows.device)
    rows[at] = rows[at].masked_fill_(bits.flatten(1)[:, : rows.shape[1]] == 0, -torch.inf)


def _ban(rows: Tensor, draws: Sequence[Draw]) -> None:
    banned = array("q", [index * rows.shape[1] + token for index, draw in enumerate(draws) for token in draw.banned])
    if banned:
        rows.view(-1)[torch.tensor(banned, device=rows.device)] = -torch.inf
