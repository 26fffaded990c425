"""Weights of 8 bits that are multiplied with rows of as many: the sums, the rounding, and that a row does not depend on
its company."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from common.cpu.jit import threads_used, use_threads
from llm_service.layers.cpu import quad_panels, selection
from llm_service.layers.cpu.quad_panels import QuadPanels
from llm_service.layers.linear.layout import quantized
from llm_service.layers.linear.quantized_weight import Number, QuantizedWeight, StackedWeight, rounded_rows
from testkit import reference  # noqa: F401 - makes transformers importable beside a CPU torch
from tests.random_weights import random_weight
from tests.tiles import WAYS, multiply_by

from compressed_tensors.quantization import QuantizationArgs  # isort: skip
from compressed_tensors.quantization.lifecycle.forward import fake_quantize  # isort: skip
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp  # isort: skip

pytestmark = pytest.mark.skipif(not selection.computes_bytes(), reason="this processor lacks AVX512-VNNI")


def made_for_it(outputs: int, inputs: int, **how: Any) -> QuantizedWeight:
    how = {"columns": inputs, "scale": torch.float32} | how
    return replace(random_weight(Number.INT8, outputs, inputs, **how), rounds_inputs=True)


def panels(*parts: QuantizedWeight, order: Tensor | None = None) -> QuadPanels:
    laid_out = QuadPanels.of(parts, order)
    assert laid_out is not None
    assert laid_out.tiles is selection.computes_byte_tiles()
    return laid_out


def rows_of(count: int, inputs: int) -> Tensor:
    """float32 [count, inputs], the last ones 10⁶ times as large as the first, which is zero."""
    x = torch.randn(count, inputs) * torch.logspace(-3, 3, count).unsqueeze(1)
    x[0] = 0
    return x


def rounded_by_transformers(x: Tensor) -> Tensor:
    """Inputs as compressed-tensors rounds each token's."""
    given = QuantizationArgs(num_bits=8, type="int", strategy="token", symmetric=True, dynamic=True)
    scale, zero = compute_dynamic_scales_and_zp(x.unsqueeze(0), given, torch.nn.Identity())
    return fake_quantize(x.unsqueeze(0), scale, zero, given).squeeze(0)


@pytest.fixture(autouse=True, params=WAYS)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_by(request.param, monkeypatch)


@pytest.fixture(params=["numba", "torch"])
def _by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "is_numba", lambda: request.param == "numba")


@pytest.mark.usefixtures("_by")
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 13, 18, 19, 25, 100])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (192, 256), (70, 100), (300, 1031), (5, 3)])
def test_a_product_is_that_of_what_transformers_rounds_inputs_to(outputs: int, inputs: int, rows: int) -> None:
    weight = made_for_it(outputs, inputs)
    x, bias = rows_of(rows, inputs), torch.randn(outputs)
    rounded = rounded_by_transformers(x).double()
    for added in (None, bias):
        given = panels(weight).product(x, added)
        assert given.dtype == torch.float32
        expected = rounded @ weight.wide().double().T + (0 if added is None else added)
        most = rounded.abs() @ weight.wide().double().abs().T + (0 if added is None else added.abs())
        assert ((given - expected).abs() <= 1e-6 * most).all()


@pytest.mark.usefixtures("_by")
@pytest.mark.parametrize("rows", [1, 7, 25])
@pytest.mark.parametrize(("outputs", "inputs"), [(192, 256), (70, 101)])
def test_inputs_are_rounded_by_the_scale_that_is_stored(outputs: int, inputs: int, rows: int) -> None:
    """What is beyond it as far as 8 bits go, however far it is; halves to even."""
    weight, scale = replace(made_for_it(outputs, inputs), input_scale=0.25), torch.tensor([0.25])
    x = torch.cat([torch.randn(rows, inputs) * 10, torch.randint(-300, 300, (rows, inputs)) / 8])
    x[0, :4] = torch.tensor([1e30, -1e30, 4e8, -4e8])
    given = QuantizationArgs(num_bits=8, type="int", strategy="tensor", symmetric=True, dynamic=False)
    rounded = fake_quantize(x, scale, torch.zeros(1, dtype=torch.int8), given)
    expected = rounded.double() @ weight.wide().double().T
    most = rounded.abs().double() @ weight.wide().double().abs().T
    laid_out = panels(weight)
    assert ((laid_out.product(x) - expected).abs() <= 1e-6 * most).all()
    assert torch.equal(laid_out.product(x[1:]), laid_out.product(x)[1:])


def test_parts_whose_inputs_have_other_scales_are_apart() -> None:
    parts = [replace(made_for_it(40, 96), input_scale=scale) for scale in (0.25, 0.5)]
    assert QuadPanels.of(parts) is None
    together, x, order = quantized(parts, torch.arange(80).flip(0)), torch.randn(7, 96), torch.arange(80).flip(0)
    assert isinstance(together, StackedWeight)
    apart = torch.cat([panels(part).product(x) for part in parts], dim=1)
    assert torch.equal(together.product(x)[:, order], apart)


def test_sums_are_exact() -> None:
    numbers = torch.randint(-128, 128, (130, 65536), dtype=torch.int8)
    numbers[:2] = torch.tensor([[-128], [127]], dtype=torch.int8)
    weight = QuantizedWeight(Number.INT8, numbers.view(torch.uint8), 65536, torch.ones(130, 1), columns=65536)
    x = torch.randint(-127, 128, (3, 65536)).float()
    x[0], x[1:, 0] = 127.5, 127.5  # a scale of 1
    given = panels(replace(weight, rounds_inputs=True)).product(x)
    assert torch.equal(given, (x.round().clamp(max=127).double() @ numbers.double().T).float())


def test_tiles_and_vectors_give_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x, bias = made_for_it(300, 530), rows_of(70, 530), torch.randn(300)
    given = panels(weight).product(x, bias)
    monkeypatch.setattr(selection, "multiplies_tiles", lambda: False)
    assert torch.equal(panels(weight).product(x, bias), given)


def test_numba_and_torch_round_rows_to_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those half-way between two as well, of which there are many among whole numbers."""
    inputs = 203
    ones = QuantizedWeight(
        Number.INT8, torch.eye(inputs, dtype=torch.uint8), inputs, torch.ones(inputs, 1), columns=inputs
    )
    laid_out = panels(replace(ones, rounds_inputs=True))
    x = torch.cat([torch.randn(400, inputs), torch.randint(-200, 200, (400, inputs)) / 2])
    numbers, scales = rounded_rows(x)
    assert torch.equal(laid_out.product(x), numbers.float() * scales.unsqueeze(1))
    monkeypatch.setattr(selection, "is_numba", lambda: False)
    assert torch.equal(laid_out.product(x), numbers.float() * scales.unsqueeze(1))


def test_a_row_s_product_is_the_same_whatever_is_beside_it() -> None:
    laid_out, x, bias = panels(made_for_it(192, 202)), rows_of(2500, 202), torch.randn(192)
    alone = torch.cat([laid_out.product(row.unsqueeze(0), bias) for row in x[:60]])
    for together in (2, 3, 7, 11, 16, 20, 33, 100, 600, 2500):
        assert torch.equal(laid_out.product(x[:together], bias)[:60], alone[:together])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_change_nothing(threads: int) -> None:
    laid_out, x = panels(made_for_it(1100, 530)), rows_of(300, 530)
    before, expected = threads_used(), laid_out.product(x)
    try:
        use_threads(threads)
        assert torch.equal(laid_out.product(x), expected)
    finally:
        use_threads(before)


@pytest.mark.usefixtures("_by")
@pytest.mark.parametrize("other", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rows", [2, 9])
def test_what_is_not_a_number_stays_in_its_row(rows: int, other: float) -> None:
    x = torch.randn(rows, 100)
    x[1, 97] = other
    given = panels(made_for_it(70, 100)).product(x)
    assert given.isnan().all(1).tolist() == [False, True, *[False] * (rows - 2)]
    assert given[0].isfinite().all()


@pytest.mark.usefixtures("_by")
def test_parts_are_one_below_the_other_and_may_be_ordered() -> None:
    parts = [made_for_it(40, 96), made_for_it(100, 96, columns=96, rows=100)]
    x, order = rows_of(7, 96), torch.randperm(140)
    apart = torch.cat([panels(part).product(x) for part in parts], dim=1)
    torch.testing.assert_close(panels(*parts).product(x), apart, rtol=1e-6, atol=0)
    ordered = panels(*parts, order=order).product(x)
    torch.testing.assert_close(ordered[:, order], apart, rtol=1e-6, atol=0)


def test_rows_in_bfloat16_stay_so() -> None:
    weight, x = panels(made_for_it(70, 100)), torch.randn(2, 3, 100).bfloat16()
    given = weight.product(x)
    assert given.dtype == torch.bfloat16
    assert torch.equal(given, weight.product(x.float()).bfloat16())


@pytest.mark.parametrize(
    "weight",
    [
        random_weight(Number.INT8, 70, 96, columns=96),
        made_for_it(70, 96, zeros=True),
        made_for_it(70, 96, columns=32),
        replace(random_weight(Number.UINT8, 70, 96, columns=96), rounds_inputs=True),
        made_for_it(1, 65540),
    ],
    ids=["inputs stay", "zeros", "groups", "no sign", "too many inputs"],
)
def test_what_does_not_fit_is_left_to_other_kernels(weight: QuantizedWeight) -> None:
    assert QuadPanels.of([weight]) is None


def test_processors_that_do_not_multiply_bytes_compute_with_wide_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quad_panels.selection, "multiplies_bytes", lambda: False)
    assert QuadPanels.of([made_for_it(70, 96)]) is None


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        panels(made_for_it(70, 96)).product(torch.randn(2, 95))
