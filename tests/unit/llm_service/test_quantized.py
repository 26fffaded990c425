"""Quantised checkpoints, beside what the libraries that write the formats make of the same tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from common.checkpoint import Checkpoint, CheckpointError
from llm_service.layers.cpu import selection
from llm_service.layers.quantized_weight import QuantizedWeight, StackedWeight
from llm_service.models.quantized import Scheme, load_weights
from tests.quantized import FORMATS, Made

OUTPUTS, INPUTS = 256, 384


def made(form: str, outputs: int = OUTPUTS, inputs: int = INPUTS) -> Made:
    return FORMATS[form](torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(7)))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(11)


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], name: str = "m") -> Checkpoint:
    """A checkpoint whose weights lie in one file and whose other tensors in another, as shards may cut them."""
    folder.mkdir(exist_ok=True)
    files = {"a.safetensors": {}, "b.safetensors": {}}
    for part, tensor in tensors.items():
        files["a.safetensors" if "scale" in part else "b.safetensors"][f"{name}.{part}"] = tensor.contiguous()
    for file, content in files.items():
        save_file(content, folder / file)
    placed = {each: file for file, content in files.items() for each in content}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return Checkpoint(folder)


@pytest.fixture(params=FORMATS)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, Tensor]]:
    """What reads a quantised weight, and the weight as the library has it."""
    config, tensors, wide = made(request.param)
    for name, read in load_weights(write(tmp_path / "model", config, tensors), lambda name: name):
        assert name == "m.weight"
        yield read, wide


def test_a_weight_is_what_its_library_makes_of_it(stored: tuple[Any, Tensor]) -> None:
    read, wide = stored
    assert read.get_shape() == list(wide.shape)
    got = read[:]
    assert got.shape == tuple(wide.shape)
    torch.testing.assert_close(got.wide(), wide, rtol=0, atol=0)


@pytest.mark.parametrize(("rows", "columns"), [((0, 64), (0, 96)), ((72, 200), (64, 328)), ((128, 160), (190, 194))])
def test_a_part_is_the_whole_ones_part(
    stored: tuple[Any, Tensor], rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    read, wide = stored
    part = read[slice(*rows), slice(*columns)]
    expected = wide[slice(*rows), slice(*columns)]
    torch.testing.assert_close(part.wide(), expected, rtol=0, atol=0)
    one = torch.eye(expected.shape[1])  # whose products are the weight's own numbers
    torch.testing.assert_close(part.product(one).T, expected, rtol=0, atol=0)
    torch.testing.assert_close(part.product(one[:5]).T, expected[:, :5], rtol=0, atol=0)
    torch.testing.assert_close(read[slice(*rows)].wide(8, 24), wide[rows[0] + 8 : rows[0] + 24], rtol=0, atol=0)


@pytest.mark.parametrize("numba", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 12])
def test_a_product_is_that_with_the_wide_weight(
    stored: tuple[Any, Tensor], rows: int, numba: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "is_numba", lambda: numba)
    read, wide = stored
    x, bias = torch.randn(rows, 2, wide.shape[1]), torch.randn(wide.shape[0])
    most = x.abs() @ wide.abs().T + bias.abs()  # of the sums' parts, which bounds what rounding does to them
    assert ((read[:].product(x, bias) - (x @ wide.T + bias)).abs() <= 1e-6 * most).all()
    narrow = read[:].product(x.bfloat16())
    assert narrow.dtype == torch.bfloat16
    assert ((narrow.float() - x @ wide.T).abs() <= 2**-7 * most).all()


def test_a_long_product_goes_over_all_outputs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("llm_service.layers.quantized_weight._AT_ONCE", 7 * INPUTS)
    config, tensors, wide = made("awq")
    ((_, read),) = load_weights(write(tmp_path / "model", config, tensors), lambda name: name)
    x = torch.randn(5, INPUTS)
    assert ((read[:].product(x) - x @ wide.T).abs() <= 1e-6 * (x.abs() @ wide.abs().T)).all()


def test_stacked_weights_are_one_below_the_other(stored: tuple[Any, Tensor]) -> None:
    read, wide = stored
    x, bias = torch.randn(2, wide.shape[1]), torch.randn(40)
    both = StackedWeight([read[8:40], read[0:8]])
    alone = torch.cat([read[8:40].product(x), read[0:8].product(x)], dim=1) + bias
    torch.testing.assert_close(both.product(x, bias), alone, rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMATS)
def test_it_stays_as_small_as_its_format(form: str, tmp_path: Path) -> None:
    config, tensors, _ = made(form)
    ((_, read),) = load_weights(write(tmp_path / "model", config, tensors), lambda name: name)
    got: QuantizedWeight = read[:]
    assert got.nbytes <= 1.1 * sum(tensor.nbytes for tensor in tensors.values())
    assert got.to(torch.device("cpu")).nbytes == got.nbytes


def test_what_is_not_quantised_is_read_as_it_is(tmp_path: Path) -> None:
    config, tensors, _ = made("awq")
    plain = torch.randn(4, 4)
    checkpoint = write(tmp_path / "model", config, tensors | {"bias": torch.ones(2)})
    save_file({"norm.weight": plain}, tmp_path / "model" / "c.safetensors")
    index = tmp_path / "model" / "model.safetensors.index.json"
    placed = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": placed | {"norm.weight": "c.safetensors"}}))
    found = dict(load_weights(Checkpoint(checkpoint.folder), lambda name: name))
    assert found.keys() == {"m.weight", "m.bias", "norm.weight"}


@pytest.mark.parametrize("missing", ["scales", "qzeros"])
def test_a_missing_part_is_named(missing: str, tmp_path: Path) -> None:
    config, tensors, _ = made("awq")
    del tensors[missing]
    with pytest.raises(CheckpointError, match=f"m is quantised and has no {missing}"):
        list(load_weights(write(tmp_path / "model", config, tensors), lambda name: name))


@pytest.mark.parametrize(
    ("form", "part", "other"),
    [
        ("awq", "scales", torch.ones(5, OUTPUTS)),
        ("gptq", "g_idx", torch.zeros(7, dtype=torch.int32)),
        ("fp8 in blocks", "weight_scale_inv", torch.ones(3, 2)),
        ("fp8 in blocks", "weight_scale_inv", torch.ones(16, 24, dtype=torch.uint8)),
        ("pack-quantized", "weight_shape", torch.tensor([OUTPUTS, 100])),
        ("nvfp4", "weight_scale", torch.ones(OUTPUTS, 3)),
    ],
)
def test_parts_that_do_not_fit_are_refused(form: str, part: str, other: Tensor, tmp_path: Path) -> None:
    config, tensors, _ = made(form)
    with pytest.raises(CheckpointError, match="m is quantised in a way that is not served"):
        list(load_weights(write(tmp_path / "model", config, tensors | {part: other}), lambda name: name))


@pytest.mark.parametrize(
    ("stated", "why"),
    [
        ({"quant_method": "bitsandbytes"}, "quantised by bitsandbytes"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ weights of 3 bits"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"a": {}}}, "marlin-24"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "compressed-tensors in the format"),
    ],
)
def test_other_schemes_are_refused_in_one_sentence(stated: dict[str, Any], why: str) -> None:
    with pytest.raises(CheckpointError, match=why) as caught:
        Scheme.of({"quantization_config": stated})
    assert "\n" not in str(caught.value)


def test_a_plain_checkpoint_has_no_scheme() -> None:
    assert Scheme.of({"text_config": {}}) is None
