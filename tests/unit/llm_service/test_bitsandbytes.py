"""Weights that bitsandbytes has quantised, beside what it makes of them itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.checkpoints.bitsandbytes import load_dense
from common.checkpoints.checkpoint import CheckpointError
from llm_service.layers.cpu import selection
from llm_service.layers.linear.layout import quantized
from llm_service.layers.linear.quantized_weight import Number, QuantizedWeight
from llm_service.models.quantized import load_weights
from tests.quantized import Format, by_bitsandbytes, by_bitsandbytes_in_8_bits
from tests.unit.llm_service.test_quantized import write

FORMS: dict[str, Format] = {
    "nf4": by_bitsandbytes("nf4"),
    "nf4 with scales in 8 bits": by_bitsandbytes("nf4", nested=True),
    "fp4": by_bitsandbytes("fp4", stored_as=torch.float16),
    "int8": by_bitsandbytes_in_8_bits,
}


def weight_of(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(3))


def read(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    ((name, stored),) = load_weights(write(folder, config, tensors), lambda name: name)
    assert name == "m.weight"
    return stored


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_is_what_its_library_makes_of_it(form: str, tmp_path: Path) -> None:
    config, tensors, expected = FORMS[form](weight_of(256, 384))
    stored = read(tmp_path / "model", config, tensors)
    assert stored.get_shape() == [256, 384]
    whole = stored[:]
    assert isinstance(whole, QuantizedWeight)
    exact = {"rtol": 1e-6, "atol": 0} if form == "int8" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(whole.wide(), expected, **exact)
    for rows, columns in ((slice(0, 64), slice(0, 96)), (slice(72, 200), slice(32, 336))):
        torch.testing.assert_close(stored[rows, columns].wide(), expected[rows, columns], **exact)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(256, 384), (24, 84)], ids=str)
def test_a_tower_has_the_weight_that_its_library_makes_of_it(form: str, shape: tuple[int, int], tmp_path: Path) -> None:
    """Also where blocks of numbers go on from one output to the next. A bias is as it is."""
    config, tensors, expected = FORMS[form](weight_of(*shape))
    bias = torch.randn(shape[0])
    found = dict(load_dense(write(tmp_path / "model", config, tensors | {"bias": bias}), lambda name: name))
    assert found.keys() == {"m.weight", "m.bias"}
    torch.testing.assert_close(found["m.weight"].float(), expected, rtol=1e-6, atol=0)
    assert torch.equal(found["m.bias"], bias)


def test_blocks_over_several_outputs_are_read_as_plain_weights(tmp_path: Path) -> None:
    config, tensors, expected = FORMS["nf4"](weight_of(24, 84))
    stored = read(tmp_path / "model", config, tensors)
    part = stored[3:20, 7:84]
    assert part.dtype == torch.bfloat16
    assert torch.equal(part.float(), expected[3:20, 7:84])


@pytest.mark.parametrize("bfloat16", [False, True])
def test_processors_compute_with_the_plain_weight(
    bfloat16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llm_service.layers.linear.weight_dtype import Rounded

    config, tensors, expected = FORMS["nf4"](weight_of(128, 192))
    whole = read(tmp_path / "model", config, tensors)[:]
    order = torch.randperm(128)
    laid_out = quantized([whole], order, rounded=Rounded(bfloat16=bfloat16))
    assert getattr(laid_out, "number", None) is None
    x = torch.randn(3, 192)
    tolerance = 1e-2 if bfloat16 else 1e-5
    torch.testing.assert_close(
        laid_out.product(x), x @ expected[order.argsort()].T, rtol=tolerance, atol=20 * tolerance
    )
    monkeypatch.setattr(selection, "allows_panels", lambda: False)
    as_it_is = quantized([whole])
    assert isinstance(as_it_is, QuantizedWeight)
    assert as_it_is.number is Number.NF4
    torch.testing.assert_close(as_it_is.product(x), x @ expected.T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("form", "changed", "why"),
    [
        ("nf4", {"weight.absmax": None}, "has no weight.absmax"),
        ("nf4", {"weight.absmax": torch.ones(3)}, "are not those of"),
        ("nf4", {"weight.quant_map": torch.linspace(-1, 1, 16)}, "its quant_map is not that of nf4"),
        ("nf4", {"weight.quant_state.bitsandbytes__nf4": None}, "has no weight.quant_state.bitsandbytes__nf4"),
        ("nf4 with scales in 8 bits", {"weight.nested_absmax": None}, "has no weight.nested_absmax"),
        ("int8", {"SCB": None}, "has no SCB"),
        ("int8", {"weight_format": torch.tensor(1, dtype=torch.uint8)}, "its weight_format"),
    ],
)
def test_what_is_broken_is_refused(form: str, changed: dict[str, Tensor | None], why: str, tmp_path: Path) -> None:
    config, tensors, _ = FORMS[form](weight_of(32, 128))
    tensors = {part: each for part, each in (tensors | changed).items() if each is not None}
    checkpoint = write(tmp_path / "model", config, tensors)
    with pytest.raises(CheckpointError, match=why):
        [stored() if callable(stored) else stored for _, stored in load_weights(checkpoint, lambda name: name)]
