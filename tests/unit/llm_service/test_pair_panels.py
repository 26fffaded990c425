"""Products of bfloat16 in panels of pairs: rounding, sums, and that a row's do not depend on its company."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.cpu.jit import threads_used, use_threads
from llm_service.layers.cpu import selection
from llm_service.layers.cpu.pair_panels import PairPanels
from tests.tiles import WAYS, multiply_by

multiplied = pytest.mark.skipif(not selection.computes_bfloat16(), reason="this processor lacks AVX512-BF16")


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True, params=WAYS)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_by(request.param, monkeypatch)


def panelled(weight: torch.Tensor) -> PairPanels:
    laid_out = PairPanels.of(weight)
    assert laid_out is not None
    return laid_out


@multiplied
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 18, 19, 24, 25, 31, 100, 600])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (192, 200), (300, 131), (70, 5)])
def test_rounded_rows_are_multiplied_with_rounded_weights_and_summed_in_float32(
    outputs: int, inputs: int, rows: int
) -> None:
    weight, x, bias = noise(outputs, inputs), noise(rows, inputs, seed=1), noise(outputs, seed=2)
    laid_out = panelled(weight)
    assert laid_out.tiles is selection.computes_tiles()
    for added in (None, bias):
        out = laid_out.product(x, added)
        assert out.dtype == torch.float32
        expected = x.bfloat16().double() @ weight.bfloat16().double().T
        expected = expected if added is None else expected + added.double()
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


@multiplied
def test_a_row_s_product_is_the_same_whatever_is_beside_it() -> None:
    laid_out, x, bias = panelled(noise(192, 202)), noise(2500, 202, seed=1), noise(192, seed=2)
    alone = torch.cat([laid_out.product(row.unsqueeze(0), bias) for row in x[:100]])
    for together in (2, 3, 7, 11, 16, 17, 20, 32, 33, 48, 100, 600, 2500):
        assert torch.equal(laid_out.product(x[:together], bias)[:100], alone[:together])


@multiplied
@pytest.mark.parametrize(("outputs", "inputs"), [(128, 64), (330, 250), (1100, 2100)])
def test_rows_are_the_same_to_the_bit_wherever_they_are_cut(outputs: int, inputs: int) -> None:
    laid_out, x = panelled(noise(outputs, inputs)), noise(300, inputs, seed=1)
    whole = laid_out.product(x)
    for cut in (*range(1, 36), 47, 48, 49, 64, 95, 97, 144, 150, 256, 287, 299):
        parts = laid_out.product(x[:cut]), laid_out.product(x[cut:])
        assert torch.equal(torch.cat(parts), whole)


@multiplied
def test_rows_are_the_same_to_the_bit_by_any_number_of_threads() -> None:
    laid_out, x = panelled(noise(1100, 2100)), noise(300, 2100, seed=1)
    given, most = laid_out.product(x), threads_used()
    try:
        use_threads(1)
        assert torch.equal(laid_out.product(x), given)
    finally:
        use_threads(most)


@multiplied
@pytest.mark.parametrize("rows", [1, 40])
def test_rows_are_rounded_as_torch_rounds_them(rows: int) -> None:
    x = noise(rows, 129)
    x[0, :6] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -(1 + 3 * 2**-8), 3.4e38, 0.0])
    given = panelled(torch.eye(129)).product(x.where(x.abs() < 1e38, torch.zeros(())))
    assert torch.equal(given[:, :4], x[:, :4].bfloat16().float())
    assert torch.equal(given[:, 6:], x[:, 6:].bfloat16().float())


@multiplied
@pytest.mark.parametrize("rows", [3, 30, 70])
def test_what_is_not_a_number_stays_in_its_row(rows: int) -> None:
    x = noise(rows, 64, seed=1)
    x.view(torch.int32)[1, 7] = 0x7FFFFFFF  # rounding alone would make -0 of it
    given = panelled(noise(64, 64)).product(x)
    assert given.isnan().all(1).tolist() == [False, True, *[False] * (rows - 2)]


@multiplied
def test_torch_computes_the_same_while_the_kernel_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x, bias = noise(4200, 67), noise(9, 67, seed=1), noise(4200, seed=2)
    laid_out = panelled(weight)
    ours = laid_out.product(x, bias)
    monkeypatch.setattr(selection, "is_numba", lambda: False)
    torch.testing.assert_close(laid_out.product(x, bias), ours, rtol=1e-5, atol=1e-4)


@multiplied
def test_rows_of_more_dimensions_and_of_other_types_are_taken() -> None:
    weight = noise(64, 64)
    laid_out = panelled(weight)
    given = laid_out.product(noise(2, 3, 64, seed=1).bfloat16())
    assert (given.shape, given.dtype) == ((2, 3, 64), torch.bfloat16)
    assert laid_out.product(torch.empty(0, 64)).shape == (0, 64)


@multiplied
def test_rows_that_do_not_fit_are_refused() -> None:
    for wrong in (noise(2, 32), noise(2, 65), noise(2, 64).double(), noise(64)):
        with pytest.raises(ValueError, match="does not fit"):
            panelled(noise(128, 64)).array_product()(wrong.numpy())


@multiplied
def test_pairs_lie_side_by_side_and_what_is_left_over_is_zeros() -> None:
    weight = noise(70, 5).bfloat16()
    numbers = torch.from_numpy(panelled(weight).panels.view(np.int16)).view(torch.bfloat16)
    padded = 16 if selection.computes_tiles() else 3
    pairs = numbers.view(2, padded, 64, 2)
    assert torch.equal(pairs[1, 2, 5], torch.stack([weight[69, 4], torch.zeros((), dtype=torch.bfloat16)]))
    assert torch.equal(pairs[0, 1, 63], weight[63, 2:4])
    assert not pairs[1, :, 6:].any()
    assert not pairs[:, 3:].any()
    assert panelled(weight).nbytes == 2 * padded * 64 * 2 * 2


def test_there_are_none_where_the_processor_does_not_multiply_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "multiplies_bfloat16", lambda: False)
    assert PairPanels.of(noise(64, 64)) is None
    monkeypatch.setattr(selection, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(selection, "wide_vectors", lambda: False)
    assert PairPanels.of(noise(64, 64)) is None
