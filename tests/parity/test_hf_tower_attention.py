"""Towers of transformers whose full attention a back end of ours computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from common.hf import models as hf_models
from encoder_service.models.attention import AttentionUnavailable, Sdpa, Segments, candidates
from encoder_service.models.hf.attention import AttendingBy, hf_backend
from encoder_service.models.hf.tower import HfTower
from encoder_service.models.processor import ItemProcessor
from tools.models.tiny import make

CPU = torch.device("cpu")


class Counting(Sdpa):
    """Torch's own attention over segments; what it was asked for."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.calls = 0

    def over(self, lengths: Any, device: torch.device) -> Segments:
        self.batches.append(list(lengths))
        segments = super().over(lengths, device)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.calls += 1
            return segments(q, k, v)

        return attend


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("named", [False, True])
def test_full_attention_is_computed_by_the_back_end_and_prepared_once_a_shape(*, named: bool) -> None:
    backend = Counting()
    q, k, v = (drawn(3, 4, 10, 16, seed=seed) for seed in range(3))
    expected = functional.scaled_dot_product_attention(q, k, v)
    with AttendingBy(backend):
        for _ in range(2):
            given = {"query": q, "key": k, "value": v} if named else {}
            found = functional.scaled_dot_product_attention(*(() if named else (q, k, v)), scale=0.25, **given)
            torch.testing.assert_close(found, expected)
    assert (backend.batches, backend.calls) == ([[10, 10, 10]], 2)


@pytest.mark.parametrize(
    ("more", "keys", "dtype"),
    [
        ({"attn_mask": torch.ones(10, 10, dtype=torch.bool).tril()}, 10, torch.bfloat16),
        ({"is_causal": True}, 10, torch.bfloat16),
        ({"scale": 0.5}, 10, torch.bfloat16),
        ({}, 12, torch.bfloat16),
        ({}, 10, torch.float32),
    ],
)
def test_any_other_attention_is_torch_s(more: dict[str, Any], keys: int, dtype: torch.dtype) -> None:
    backend = Counting()
    q = drawn(1, 4, 10, 16, seed=1, dtype=dtype)
    k, v = (drawn(1, 4, keys, 16, seed=seed, dtype=dtype) for seed in (2, 3))
    expected = functional.scaled_dot_product_attention(q, k, v, **more)
    with AttendingBy(backend):
        assert torch.equal(functional.scaled_dot_product_attention(q, k, v, **more), expected)
    assert backend.calls == 0


def test_what_a_tower_does_not_have_is_refused_by_name() -> None:
    with pytest.raises(AttentionUnavailable, match="--attention triton: this model's tower has"):
        hf_backend("triton", CPU, torch.bfloat16)
    assert hf_backend("auto", CPU, torch.float32).name == "sdpa"


@pytest.mark.parametrize("kind", ["gemma3", "llava", "idefics3"])
def test_rows_are_as_near_to_float32_s_as_by_torch(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "numba" not in candidates(CPU, torch.bfloat16):
        pytest.skip("this processor lacks AVX512-BF16")
    folder = make(kind, tmp_path)
    found, processor = hf_models.describe(folder), ItemProcessor(folder)
    pixels = np.random.default_rng(3).integers(0, 256, (97, 130, 3), dtype=np.uint8)
    tokens = sum(part.rows for part in processor.replacement(pixels))
    inputs = processor.inputs(pixels)
    backend = hf_backend("numba", CPU, torch.bfloat16)
    calls: list[int] = []
    right = AttendingBy._attend
    monkeypatch.setattr(AttendingBy, "_attend", lambda mode, *given: (calls.append(1), right(mode, *given))[1])

    @torch.inference_mode()
    def rows(dtype: torch.dtype, by: Any = None) -> Tensor:
        return HfTower(folder, found, dtype, CPU, by).rows(inputs, tokens).float()

    exact, theirs, ours = rows(torch.float32), rows(torch.bfloat16), rows(torch.bfloat16, backend)
    assert calls, "nothing of this tower goes through our kernel"
    assert 0 < (ours - exact).norm() <= 1.1 * (theirs - exact).norm()
