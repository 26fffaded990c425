"""Weights rounded to 8 bits: what it costs, in every form that is computed with."""

from __future__ import annotations

import pytest
import torch

from llm_service.layers.cpu.quantized_panels import QuantizedPanels
from llm_service.layers.gpu.quantized_weight import GpuWeight
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.linear.quantized_weight import QuantizedWeight
from llm_service.layers.linear.weight_dtype import Rounded


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_weight_is_off_by_half_a_step_at_most_and_its_largest_number_not_at_all() -> None:
    weight = drawn(70, 33) * torch.logspace(-3, 3, 70).unsqueeze(1)
    rounded = QuantizedWeight.rounded(weight)
    assert rounded.codes.nbytes == weight.numel()
    assert ((rounded.wide() - weight).abs() <= 0.501 * rounded.scale).all()
    torch.testing.assert_close(rounded.wide().abs().amax(1), weight.abs().amax(1))


def test_outputs_of_nothing_but_zeros_stay_zero() -> None:
    rounded = QuantizedWeight.rounded(torch.zeros(3, 8))
    assert torch.equal(rounded.product(drawn(2, 8)), torch.zeros(2, 3))


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17, 40])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.06)])
def test_few_rows_and_many_give_the_product_with_the_widened_weight(
    rows: int, dtype: torch.dtype, tolerance: float
) -> None:
    rounded, bias = QuantizedWeight.rounded(drawn(33, 70)), drawn(33, seed=1).to(dtype)
    x = drawn(rows, 70, seed=rows).to(dtype)
    expected = x.float() @ rounded.wide().T + bias.float()
    panels = QuantizedPanels.of([rounded])
    assert panels is not None
    for form in (rounded, panels):
        given = form.product(x, bias)
        assert given.dtype == dtype
        torch.testing.assert_close(given.float(), expected, rtol=tolerance, atol=tolerance)


def test_in_panels_a_row_is_the_same_to_the_bit_whatever_rows_are_beside_it() -> None:
    panels = QuantizedPanels.of([QuantizedWeight.rounded(drawn(130, 333))])
    assert panels is not None
    x = drawn(40, 333, seed=1)
    whole = panels.product(x)
    for count in (1, 2, 3, 5, 6, 7, 13):
        assert torch.equal(panels.product(x[:count]), whole[:count])


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 64, 128), (3, 33, 70), (20, 130, 200)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 0.02)])
def test_the_kernel_for_gpus_gives_the_same(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, tolerance: float
) -> None:
    """In Triton's interpreter, which makes no bfloat16 of integers."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rounded, x = QuantizedWeight.rounded(drawn(outputs, inputs)), drawn(rows, inputs, seed=1)
    weight = GpuWeight.of([rounded.to(torch.device(device))])
    assert weight is not None
    given = weight.product(x.to(device, dtype)).cpu()
    torch.testing.assert_close(given.float(), x @ rounded.wide().T, rtol=tolerance, atol=tolerance)


def test_a_layer_is_rounded_when_it_is_finalized_and_lets_go_of_its_weight() -> None:
    layer = PackedLinear(slice(0, 64), {"part": slice(0, 48)}, bias=True, dtype=torch.float32)
    for parameter in layer.parameters():
        parameter.data.copy_(drawn(*parameter.shape))
    x = drawn(3, 64, seed=2)
    expected = layer(x)
    layer.finalize(rounded=Rounded(int8=True))
    assert layer.weight.numel() == 0
    given = layer(x)
    assert not torch.equal(given, expected)
    assert (given - expected).norm() / expected.norm() < 0.01
    assert layer(drawn(2, 3, 64)).shape == (2, 3, 48)
