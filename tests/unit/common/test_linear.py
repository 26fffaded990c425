"""A finalized linear layer computes what the plain one did, whatever the number of rows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import TypeVar

import pytest
import torch
from torch import nn
from torch.nn import functional

from common.cpu.linear import BlockedWeight, LaidOut, Linear, finalize_linears
from llm_service.layers.cpu.panels import PanelWeight
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.linear.quantized_weight import QuantizedWeight
from llm_service.layers.linear.weight_dtype import Rounded

Kind = TypeVar("Kind", bound=Linear)


def filled(inputs: int, outputs: int, *, bias: bool = True, dtype: torch.dtype = torch.float32) -> Linear:
    return with_noise(Linear(inputs, outputs, bias=bias, dtype=dtype))


def packed(inputs: int, outputs: int, *, bias: bool = True, dtype: torch.dtype = torch.float32) -> PackedLinear:
    return with_noise(PackedLinear(slice(0, inputs), {"part": slice(0, outputs)}, bias=bias, dtype=dtype))


def with_noise(layer: Kind) -> Kind:
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_every_number_of_rows_gives_the_plain_product(bias: bool, dtype: torch.dtype, tolerance: float) -> None:
    layer = filled(48, 33, bias=bias, dtype=dtype)
    weight = layer.weight.detach().clone()
    layer.finalize()
    for rows in (1, 2, 3, 4, 5, 8, 17, 64):
        x = torch.randn(rows, 48, generator=torch.Generator().manual_seed(rows)).to(dtype)
        out = layer(x)
        assert out.shape == (rows, 33)
        torch.testing.assert_close(out, functional.linear(x, weight, layer.bias), rtol=tolerance, atol=tolerance)


class Halved(nn.Module):
    """An activation that oneDNN does not know."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


@pytest.mark.parametrize("activation", [nn.GELU(), nn.GELU(approximate="tanh"), nn.SiLU(), Halved()])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("panels", [False, True])
def test_an_activation_in_the_same_pass_is_the_same(
    panels: bool, activation: nn.Module, dtype: torch.dtype, tolerance: float
) -> None:
    layer = (packed if panels else filled)(48, 33, dtype=dtype)
    for rows in (1, 2, 17):
        x = torch.randn(rows, 48, generator=torch.Generator().manual_seed(rows)).to(dtype)
        expected = activation(layer(x).float()).to(dtype)
        torch.testing.assert_close(layer(x, activation), expected, rtol=tolerance, atol=tolerance)
    layer.finalize()
    torch.testing.assert_close(layer(x, activation), expected, rtol=tolerance, atol=tolerance)


def test_a_batch_of_any_shape_is_taken() -> None:
    layer = filled(16, 8)
    x = torch.randn(2, 3, 16)
    expected = layer(x)
    layer.finalize()
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", [BlockedWeight.of, PanelWeight.of, QuantizedWeight.rounded])
def test_a_batch_of_no_rows_gives_none(form: Callable[[torch.Tensor], LaidOut]) -> None:
    layer = filled(16, 8)
    layer.laid_out = form(layer.weight.detach())
    assert layer(torch.empty(0, 16)).shape == (0, 8)


@pytest.mark.parametrize("rounded", [Rounded(*both) for both in product((False, True), repeat=2)])
def test_a_batch_of_no_rows_gives_none_of_packed_parts(rounded: Rounded) -> None:
    layer = packed(16, 8)
    layer.finalize(rounded=rounded)
    assert layer(torch.empty(0, 16)).shape == (0, 8)


def test_the_plain_weight_is_let_go_of_unless_another_module_has_it() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.head = filled(16, 8), filled(16, 8)
            self.words = nn.Embedding(8, 16)
            self.head.weight = self.words.weight

    model = Tied().requires_grad_(requires_grad=False)
    ids = torch.arange(8)
    words, logits = model.words(ids), model.head(model.words(ids))
    finalize_linears(model)
    assert model.own.weight.numel() == 0
    assert torch.equal(model.words(ids), words)
    torch.testing.assert_close(model.head(words), logits, rtol=1e-4, atol=1e-4)
