"""A weight as oneDNN lays it out: what it takes, and that numbers of rows that it is handed padded come back whole."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from common.cpu.linear import BlockedWeight


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 2, 3, 17])
def test_rows_are_multiplied_as_by_torch(rows: int) -> None:
    weight, bias, x = noise(96, 40), noise(96, seed=1), noise(rows, 40, seed=2)
    laid_out = BlockedWeight.of(weight)
    if laid_out is None:
        pytest.skip("this torch has no oneDNN")
    for added in (None, bias):
        expected = functional.linear(x, weight, added)
        torch.testing.assert_close(laid_out.product(x, added), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_types_are_not_laid_out(dtype: torch.dtype) -> None:
    assert BlockedWeight.of(noise(64, 64).to(dtype)) is None


def test_an_empty_weight_is_not_laid_out() -> None:
    assert BlockedWeight.of(torch.empty(0, 64)) is None
