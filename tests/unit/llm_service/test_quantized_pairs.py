"""Quantised weights multiplied in pairs of bfloat16: what is rounded, and that a row's sums do not depend on others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from llm_service.layers.cpu import quantized_kernel, quantized_pairs, quantized_tiles, selection
from llm_service.layers.cpu.quantized_panels import QuantizedPanels
from llm_service.layers.linear.layout import quantized
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.linear.quantized_weight import QuantizedWeight
from llm_service.layers.linear.weight_dtype import Rounded
from tests.quantized import FORMATS, Format, awq, fp8, gptq
from tests.tiles import WAYS, multiply_by
from tests.unit.llm_service.test_quantized import INPUTS, OUTPUTS, quantised, quantised_by

multiplied = pytest.mark.skipif(not selection.computes_bfloat16(), reason="this processor lacks AVX512-BF16")
LONG: dict[str, Format] = {
    "fp8": fp8(128),
    "awq": partial(awq, group=64),
    "awq, short groups": partial(awq, group=32),
    "gptq in order of importance": gptq(ordered=True, group=64),
    "gptq of 8 bits": gptq(8, group=128),
    **{form: FORMATS[form] for form in ("float-quantized, a scale an output", "int-quantized, with zeros")},
    **{form: FORMATS[form] for form in ("modelopt FP8", "modelopt MXFP8", "modelopt W4A8_MXFP4_FP8")},
    "4 bits, a scale an output": FORMATS["pack-quantized, a scale an output"],
}
SHORT = ("fp8 in blocks", "nvfp4", "modelopt NVFP4", "awq")


@pytest.fixture(autouse=True, params=WAYS)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_by(request.param, monkeypatch)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def panels(weight: QuantizedWeight) -> QuantizedPanels:
    laid_out = QuantizedPanels.of([weight], bfloat16=True)
    assert laid_out is not None
    return laid_out


def drawn(form: str, outputs: int = OUTPUTS) -> QuantizedWeight:
    """A weight of a format with long groups."""
    config, tensors, _ = LONG[form](noise(outputs, INPUTS, seed=7))
    return quantised_by(config, tensors)


@multiplied
@pytest.mark.parametrize(
    ("weight", "pairs"),
    [*((partial(drawn, form), True) for form in LONG), *((partial(quantised, form), False) for form in SHORT)],
)
def test_groups_that_are_long_are_multiplied_in_pairs(weight: Callable[[], QuantizedWeight], *, pairs: bool) -> None:
    laid_out = panels(weight())
    in_pairs = quantized_tiles if selection.computes_tiles() else quantized_pairs
    module = in_pairs if pairs else quantized_kernel
    assert laid_out.kernel is module
    assert laid_out.kernels == {f"{module.__name__}:product"}


@multiplied
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 16, 17, 27, 40])
@pytest.mark.parametrize("form", LONG)
def test_rows_alone_are_rounded(form: str, rows: int) -> None:
    weight = drawn(form)
    wide = weight.wide().double()
    x, bias = noise(rows, INPUTS), noise(len(wide), seed=1)
    rounded = x.bfloat16().double()
    given = panels(weight).product(x, bias)
    assert given.dtype == torch.float32
    most = rounded.abs() @ wide.abs().T + bias.abs() + 8 * rounded.abs().sum(1, keepdim=True) * wide.abs().max()
    assert ((given.double() - (rounded @ wide.T + bias)).abs() <= 1e-6 * most).all()


@multiplied
@pytest.mark.parametrize("form", ["awq", "float-quantized, a scale an output", "gptq in order of importance"])
def test_a_row_is_the_same_to_the_bit_whatever_rows_are_beside_it(form: str) -> None:
    laid_out, x = panels(drawn(form, 136)), noise(2500, INPUTS)
    alone = torch.cat([laid_out.product(row.unsqueeze(0)) for row in x[:40]])
    for count in (2, 5, 6, 7, 12, 13, 16, 17, 20, 32, 33, 40, 600, 2500):
        assert torch.equal(laid_out.product(x[:count])[:40], alone[:count])


@multiplied
@pytest.mark.parametrize("rows", [2, 20, 40])
def test_what_is_not_a_number_stays_in_its_row(rows: int) -> None:
    x = noise(rows, INPUTS)
    x[1, 7] = torch.nan
    given = panels(drawn("awq")).product(x)
    assert given.isnan().all(1).tolist() == [False, True, *[False] * (rows - 2)]


@multiplied
def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        panels(drawn("awq")).product(noise(2, INPUTS - 1))


@pytest.mark.parametrize(
    ("ends", "fits"), [([384], True), ([128, 256, 384], True), ([64, 129, 384], False), ([16, 384], False)]
)
def test_no_pair_is_in_two_groups(ends: list[int], *, fits: bool) -> None:
    assert quantized_pairs.fits(np.array(ends, np.int32)) is fits


def test_an_odd_number_of_inputs_is_multiplied_one_by_one() -> None:
    weight, x = QuantizedWeight.rounded(noise(70, 131)), noise(3, 131, seed=1)
    laid_out = quantized([weight], rounded=Rounded(bfloat16=True))
    torch.testing.assert_close(laid_out.product(x), x @ weight.wide().T)


@multiplied
def test_a_layer_is_rounded_to_8_bits_and_multiplied_in_bfloat16() -> None:
    layer = PackedLinear(slice(0, 128), {"part": slice(0, 48)}, bias=False, dtype=torch.float32)
    layer.weight.data.copy_(noise(48, 128))
    weight, x = QuantizedWeight.rounded(layer.weight.detach()), noise(9, 128, seed=1)
    layer.finalize(rounded=Rounded(int8=True, bfloat16=True))
    assert isinstance(layer.laid_out, QuantizedPanels)
    assert layer.laid_out.kernel is not quantized_kernel
    torch.testing.assert_close(layer(x), x.bfloat16().float() @ weight.wide().T)
