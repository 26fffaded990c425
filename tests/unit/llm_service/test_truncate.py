"""What top-k, top-p and min-p leave, against transformers' processors; vocabularies need not be sorted as a whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llm_service.plan import Draw
from llm_service.worker.sampler import min_kept

VOCABULARY = 20_000
ROWS = 12
FLAT, PEAKED = 0.3, 4.0
SETTINGS: list[dict[str, Any]] = [
    {"top_p": 0.5},
    {"top_p": 0.99},
    {"top_k": 40},
    {"top_k": 3000},
    {"top_k": 15_000},
    {"top_k": 3000, "top_p": 0.05},
    {"top_k": 10_000, "top_p": 0.3},
    {"top_k": 10_000, "top_p": 0.98},
    {"min_p": 0.01},
    {"top_k": 900, "top_p": 0.99, "min_p": 0.002},
    {"top_k": 1},
    {},
]


def kept(rows: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
    """bool [k, vocabulary]: what may be drawn."""
    temperature = torch.tensor([[draw.temperature] for draw in draws])
    values = (rows.double() - rows.amax(-1, keepdim=True)) / temperature
    return values >= min_kept(values, values.exp(), draws).unsqueeze(-1)


def kept_by_reference(row: torch.Tensor, draw: Draw) -> torch.Tensor:
    processors: list[Any] = [TemperatureLogitsWarper(draw.temperature)]
    processors += [TopKLogitsWarper(draw.top_k)] if draw.top_k else []
    processors += [TopPLogitsWarper(draw.top_p)] if draw.top_p < 1.0 else []
    processors += [MinPLogitsWarper(draw.min_p)] if draw.min_p else []
    ids: Any = torch.tensor([[0]])
    scores: torch.Tensor = LogitsProcessorList(processors)(ids, row.double().unsqueeze(0))
    return scores[0].isfinite()


@pytest.mark.parametrize("spread", [FLAT, PEAKED])
@pytest.mark.parametrize("seed", [0, 1])
def test_each_row_of_a_batch_keeps_what_the_references_processors_keep(spread: float, seed: int) -> None:
    rows = spread * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    draws = [Draw(at=0, temperature=0.7 + 0.1 * n, **settings) for n, settings in enumerate(SETTINGS)]
    for row, draw, own in zip(rows, draws, kept(rows, draws), strict=True):
        wanted = kept_by_reference(row, draw)
        # Sums of thousands of shares, in two orders, may disagree over the token at the edge, and over no other.
        assert int((own != wanted).sum()) <= (draw.top_p < 1.0), draw
        assert own[row.argmax()]


def test_a_row_is_cut_alike_whatever_else_is_in_the_batch() -> None:
    rows = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(2))
    rows[::2] *= PEAKED
    draws = [Draw(at=0, temperature=1.0, **settings) for settings in SETTINGS]
    alone = torch.cat([kept(rows[n : n + 1], [draws[n]]) for n in range(ROWS)])
    assert torch.equal(kept(rows, draws), alone)
