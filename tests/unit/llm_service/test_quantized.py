"""Quantised checkpoints, beside what the libraries that write the formats make of the same tensors."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from llm_service.layers.cpu import selection
from llm_service.layers.cpu.quantized_panels import QuantizedPanels
from llm_service.layers.linear.layout import quantized
from llm_service.layers.linear.placement import StoredStack
from llm_service.layers.linear.quantized_weight import QuantizedWeight, StackedWeight
from llm_service.model_config.stated_quantization import cache_type_of
from llm_service.models.quantization_config import Scheme, quantization_of
from llm_service.models.quantized import load_weights
from tests.quantized import FORMATS, Made, fp8

OUTPUTS, INPUTS = 256, 384
_UNKNOWN = {"quant_algo": "X"}


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


def quantised(form: str, outputs: int = OUTPUTS) -> QuantizedWeight:
    """A weight of this format."""
    config, tensors, _ = made(form, outputs)
    return quantised_by(config, tensors)


def quantised_by(config: dict[str, Any], tensors: dict[str, Tensor]) -> QuantizedWeight:
    """The weight of a module's tensors."""
    with tempfile.TemporaryDirectory() as folder:
        ((_, read),) = load_weights(write(Path(folder), config, tensors), lambda name: name)
        weight: QuantizedWeight = read[:]
    return weight


def panels(weight: QuantizedWeight) -> QuantizedPanels:
    """The same for this processor."""
    laid_out = QuantizedPanels.of([weight])
    assert laid_out is not None
    return laid_out


@pytest.fixture(params=FORMATS)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, Tensor]]:
    """What reads a quantised weight, and the weight as transformers has it."""
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
    laid_out = panels(part)
    torch.testing.assert_close(laid_out.wide(), expected, rtol=1e-6, atol=0)  # it divides by NVFP4's divisor last
    torch.testing.assert_close(laid_out.product(one).T, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(laid_out.product(one[:2]).T, expected[:, :2], rtol=1e-6, atol=0)
    torch.testing.assert_close(read[slice(*rows)].wide(8, 24), wide[rows[0] + 8 : rows[0] + 24], rtol=0, atol=0)


@pytest.mark.parametrize("form", ["as it is", "panels", "panels, by torch"])
def test_a_product_is_that_with_the_wide_weight(
    stored: tuple[Any, Tensor], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "is_numba", lambda: form == "panels")
    read, wide = stored
    laid_out = read[:] if form == "as it is" else panels(read[:])
    bias = torch.randn(wide.shape[0])
    for rows in (1, 2, 3, 4, 5, 7, 24, 27):
        x = torch.randn(rows, 1, wide.shape[1])
        most = x.abs() @ wide.abs().T + bias.abs()  # of the sums' parts, which bounds what rounding does to them
        assert ((laid_out.product(x, bias) - (x @ wide.T + bias)).abs() <= 1e-6 * most).all(), rows
        narrow = laid_out.product(x.bfloat16())
        assert narrow.dtype == torch.bfloat16
        assert ((narrow.float() - x @ wide.T).abs() <= 2**-7 * most).all(), rows


def test_so_many_rows_that_tasks_share_a_panel() -> None:
    weight = quantised("awq", 72)
    x = torch.randn(2100, INPUTS)
    wide = weight.wide()
    assert ((panels(weight).product(x) - x @ wide.T).abs() <= 1e-6 * (x.abs() @ wide.abs().T)).all()


@pytest.mark.parametrize("rows", [2, 9])
def test_what_is_not_a_number_stays_in_its_row(rows: int) -> None:
    x = torch.randn(rows, INPUTS)
    x[1, 7] = torch.nan
    given = panels(quantised("awq")).product(x)
    assert given.isnan().all(1).tolist() == [False, True, *[False] * (rows - 2)]


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        panels(quantised("awq")).product(torch.randn(2, INPUTS - 1))


def test_a_weight_that_is_not_a_number_is_refused() -> None:
    weight = quantised("float-quantized, one scale")
    weight.codes[3, 5] = 0xFF
    with pytest.raises(ValueError, match="not a number"):
        panels(weight)


def test_a_processor_without_fused_vectors_has_no_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert QuantizedPanels.of([quantised("awq")]) is None


def test_a_long_product_goes_over_all_outputs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("llm_service.layers.linear.quantized_weight._AT_ONCE", 7 * INPUTS)
    config, tensors, wide = made("awq")
    ((_, read),) = load_weights(write(tmp_path / "model", config, tensors), lambda name: name)
    x = torch.randn(5, INPUTS)
    assert ((read[:].product(x) - x @ wide.T).abs() <= 1e-6 * (x.abs() @ wide.abs().T)).all()


def test_weights_quantised_alike_become_one(stored: tuple[Any, Tensor]) -> None:
    read, wide = stored
    order = torch.randperm(40)
    both = quantized([read[8:40], read[0:8]], order)
    assert isinstance(both, QuantizedPanels)
    expected = torch.cat([wide[8:40], wide[0:8]])[order.argsort()]
    torch.testing.assert_close(both.wide(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("other", ["awq", "int-quantized"])
def test_weights_quantised_otherwise_are_one_below_the_other(other: str) -> None:
    parts = [quantised("gptq of 8 bits", 40), quantised(other, 8)]
    x, bias, order = torch.randn(2, INPUTS), torch.randn(48), torch.randperm(48)
    both = quantized(parts, order)
    assert isinstance(both, StackedWeight)
    assert both.kernels == panels(parts[0]).kernels
    alone = torch.cat([panels(part).product(x) for part in parts], dim=1)[:, order.argsort()] + bias
    torch.testing.assert_close(both.product(x, bias), alone, rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMATS)
def test_it_stays_as_small_as_its_format(form: str, tmp_path: Path) -> None:
    config, tensors, _ = made(form)
    ((_, read),) = load_weights(write(tmp_path / "model", config, tensors), lambda name: name)
    got: QuantizedWeight = read[:]
    assert got.nbytes <= 1.1 * sum(tensor.nbytes for tensor in tensors.values())
    assert got.to(torch.device("cpu")).nbytes == got.nbytes


@pytest.mark.parametrize("form", [*(form for form in FORMATS if "blocks" not in form), "fp8 in blocks of 128"])
def test_so_do_its_panels(form: str) -> None:
    """Blocks of 128 are those that checkpoints have; smaller ones, for tests, have a scale for an output here."""
    made = fp8(128) if form.endswith("128") else FORMATS[form]
    config, tensors, _ = made(torch.randn(256, 1024))
    assert panels(quantised_by(config, tensors)).nbytes <= 1.1 * sum(tensor.nbytes for tensor in tensors.values())


def test_what_is_not_quantised_is_read_as_it_is(tmp_path: Path) -> None:
    config, tensors, _ = made("awq")
    plain = torch.randn(4, 4)
    checkpoint = write(tmp_path / "model", config, tensors | {"bias": torch.ones(2)})
    scales = {f"attention.{each}_scale": torch.ones(1) for each in ("k", "v")}  # of a KV cache
    save_file({"norm.weight": plain} | scales, tmp_path / "model" / "c.safetensors")
    index = tmp_path / "model" / "model.safetensors.index.json"
    placed = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": placed | dict.fromkeys(("norm.weight", *scales), "c.safetensors")}))
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
        ("modelopt NVFP4", "weight_scale", torch.ones(OUTPUTS, INPUTS // 16)),
        ("modelopt NVFP4", "weight_scale", torch.ones(OUTPUTS, 3).to(torch.float8_e4m3fn)),
        ("modelopt NVFP4", "weight_scale_2", torch.ones(2)),
        ("modelopt FP8_PB_WO", "weight_scale", torch.ones(3, 1, 3, 1)),
        ("modelopt MXFP8", "weight_scale", torch.full((OUTPUTS, INPUTS // 32), 255, dtype=torch.uint8)),
        ("modelopt FP8", "pre_quant_scale", torch.ones(INPUTS)),
        ("modelopt NVFP4", "svdquant_lora_a", torch.ones(4, INPUTS)),
        ("fp8 in blocks", "weight", torch.ones(OUTPUTS, INPUTS, dtype=torch.uint8)),
    ],
)
def test_parts_that_do_not_fit_are_refused(form: str, part: str, other: Tensor, tmp_path: Path) -> None:
    config, tensors, _ = made(form)
    with pytest.raises(CheckpointError, match="m is quantised in an unsupported way"):
        list(load_weights(write(tmp_path / "model", config, tensors | {part: other}), lambda name: name))


@pytest.mark.parametrize(
    ("stated", "why"),
    [
        ({"quant_method": "bitnet"}, "quantised by bitnet"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ weights of 3 bits"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"a": {}}}, "marlin-24"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "compressed-tensors in the format"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "as W4A16_AWQ .*: its layers scale their inputs"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_SVD"}, "as NVFP4_SVD .*: its layers have a matrix of low"),
        ({"quant_method": "modelopt_fp4", "quant_algo": "INT3"}, "that Model Optimizer quantised as INT3 are not"),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": _UNKNOWN}},
            "quantised as X are not served",
        ),
    ],
)
def test_other_schemes_are_refused_in_one_sentence(stated: dict[str, Any], why: str) -> None:
    with pytest.raises(CheckpointError, match=why) as caught:
        Scheme.of({"quantization_config": stated})
    assert "\n" not in str(caught.value)


def test_a_plain_checkpoint_has_no_scheme() -> None:
    assert Scheme.of({"text_config": {}}) is None


@pytest.mark.parametrize("place", ["hf_quant_config.json", "config.json", "config.json, as the other"])
def test_model_optimizer_is_understood_wherever_it_states_what_it_did(place: str, tmp_path: Path) -> None:
    config, tensors, wide = made("modelopt NVFP4")
    older = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
    checkpoint = write(tmp_path / "model", config if place == "config.json" else older, tensors)
    if place == "hf_quant_config.json":
        (checkpoint.folder / "config.json").write_text("{}")
        (checkpoint.folder / place).write_text(json.dumps(older))
    ((_, read),) = load_weights(checkpoint, lambda name: name)
    torch.testing.assert_close(read[:].wide(), wide, rtol=0, atol=0)
    assert quantization_of(checkpoint.config) == "modelopt"
    assert cache_type_of(checkpoint.config) == ("float8" if place == "config.json" else "FP8")


def test_scales_of_a_cache_alone_are_left_out(tmp_path: Path) -> None:
    """Of weights that nothing has quantised."""
    plain = {"weight": torch.randn(4, 4), "k_scale": torch.ones(()), "k_bias": torch.ones(())}
    stated = {"quant_method": "modelopt", "kv_cache_scheme": {"type": "float", "num_bits": 8}, "ignore": []}
    checkpoint = write(tmp_path / "model", stated, plain, name="attn.k_proj")
    assert Scheme.of(checkpoint.config) is None
    assert quantization_of(checkpoint.config) == ""
    assert [name for name, _ in load_weights(checkpoint, lambda name: name)] == ["attn.k_proj.weight"]


def test_a_power_of_two_that_is_no_number_is_refused(tmp_path: Path) -> None:
    config, tensors, _ = made("modelopt W4A8_MXFP4_FP8")
    tensors["weight_scale"][3, 2] = 255
    ((_, read),) = load_weights(write(tmp_path / "model", config, tensors), lambda name: name)
    assert read[:3].shape == (3, INPUTS)
    with pytest.raises(ValueError, match="one of its scales is not a number"):
        read[:4]


def stack(tensors: dict[str, Tensor], tmp_path: Path) -> StoredStack:
    """What reads experts' weights in one tensor."""
    named = {f"gate_up_proj{'' if part == 'weight' else f'_{part}'}": each for part, each in tensors.items()}
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    ((name, read),) = load_weights(write(tmp_path / "model", config, named, "mlp.experts"), lambda name: name)
    assert name == "mlp.experts.gate_up_proj"
    assert isinstance(read, StoredStack)
    return read


@pytest.mark.parametrize("inputs_first", [False, True])
@pytest.mark.parametrize("form", ["modelopt NVFP4", "modelopt FP8", "modelopt MXFP8", "modelopt W4A8_MXFP4_FP8"])
@pytest.mark.parametrize("each_its_own", [False, True])
def test_experts_in_one_tensor_are_read_one_by_one(
    form: str, tmp_path: Path, *, inputs_first: bool, each_its_own: bool
) -> None:
    """With a scale over all experts, or over each."""
    _, flat, wide = made(form, 3 * 48, 64)
    tensors = {part: each.view(3, 48, -1) if each.dim() == 2 else each.reshape(()) for part, each in flat.items()}
    if each_its_own:
        tensors = {part: each if each.dim() else torch.stack([each] * 3) for part, each in tensors.items()}
    if inputs_first:
        tensors = {part: each.transpose(1, 2) if each.dim() == 3 else each for part, each in tensors.items()}
    read = stack(tensors, tmp_path)
    assert read.get_shape() == ([3, 64, 48] if inputs_first else [3, 48, 64])
    for number, expected in enumerate(wide.view(3, 48, 64)):
        one = read.of_expert(number, inputs_first=inputs_first)
        assert one.get_shape() == [48, 64]
        torch.testing.assert_close(one[:].wide(), expected, rtol=0, atol=0)
        torch.testing.assert_close(one[8:24, 32:64].wide(), expected[8:24, 32:64], rtol=0, atol=0)


def test_experts_of_which_two_outputs_are_in_a_byte_are_refused(tmp_path: Path) -> None:
    _, tensors, _ = made("modelopt NVFP4", 48, 64)
    read = stack({part: each.expand(3, *each.shape) for part, each in tensors.items()}, tmp_path)
    with pytest.raises(ValueError, match="numbers of several outputs are in a byte"):
        read.of_expert(0, inputs_first=True)
    with pytest.raises(ValueError, match="experts in one tensor are quantised"):
        read[:]
