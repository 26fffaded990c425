"""Weights in 8 bits: what rounding costs, and every kernel against the widened weight."""

from __future__ import annotations

import pytest
import torch

from llm_service.layers.cpu import int8_kernel as int8_cpu
from llm_service.layers.gpu import int8_kernel as int8_gpu
from llm_service.layers.linear import PackedLinear
from llm_service.layers.quantization import Int8Weight


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_weight_is_off_by_half_a_step_at_most_and_its_largest_number_not_at_all() -> None:
    weight = drawn(70, 33) * torch.logspace(-3, 3, 70).unsqueeze(1)
    rounded = Int8Weight.of(weight)
    assert rounded.values.dtype == torch.int8
    error = (rounded.wide(torch.float32) - weight).abs()
    assert (error <= 0.501 * rounded.scale.unsqueeze(1)).all()
    torch.testing.assert_close(rounded.wide(torch.float32).abs().amax(1), weight.abs().amax(1))


def test_outputs_of_nothing_but_zeros_stay_zero() -> None:
    rounded = Int8Weight.of(torch.zeros(3, 8))
    assert torch.equal(rounded.product(drawn(2, 8)), torch.zeros(2, 3))


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17, 40])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.06)])
def test_few_rows_and_many_give_the_product_with_the_widened_weight(
    rows: int, dtype: torch.dtype, tolerance: float
) -> None:
    rounded, bias, x = Int8Weight.of(drawn(33, 70)), drawn(33, seed=1).to(dtype), drawn(rows, 70, seed=rows).to(dtype)
    expected = x.float() @ rounded.wide(torch.float32).T + bias.float()
    given = rounded.product(x, bias)
    assert given.dtype == dtype
    torch.testing.assert_close(given.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 64, 128), (3, 33, 70), (20, 130, 200)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 0.02)])
def test_the_kernel_for_gpus_gives_the_same(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, tolerance: float
) -> None:
    """In Triton's interpreter, which has no products in bfloat16."""
    rounded, x = Int8Weight.of(drawn(outputs, inputs)), drawn(rows, inputs, seed=1)
    expected = int8_cpu.product(x, rounded.values, rounded.scale)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    there = (each.to(device) for each in (x.to(dtype), rounded.values, rounded.scale))
    given = int8_gpu.product(*there).cpu()
    torch.testing.assert_close(given.float(), expected, rtol=tolerance, atol=tolerance)


def test_a_layer_is_rounded_when_it_is_finalized_and_lets_go_of_its_weight() -> None:
    layer = PackedLinear(slice(0, 64), {"part": slice(0, 48)}, bias=True, dtype=torch.float32)
    for parameter in layer.parameters():
        parameter.data.copy_(drawn(*parameter.shape))
    x = drawn(3, 64, seed=2)
    expected = layer(x)
    layer.finalize(int8=True)
    assert layer.weight.numel() == 0
    given = layer(x)
    assert not torch.equal(given, expected)
    assert (given - expected).norm() / expected.norm() < 0.01
    assert layer(drawn(2, 3, 64)).shape == (2, 3, 48)
