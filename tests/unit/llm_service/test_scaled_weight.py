"""Products of e4m3 with e4m3, by a stand-in for the library: its own checks of layouts, and plain arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType

from llm_service.layers.gpu import quantized_weight as module
from llm_service.layers.gpu import scaled_weight
from llm_service.layers.gpu.quantized_weight import GpuWeight
from llm_service.layers.gpu.scaled_weight import ScaledExperts, ScaledWeight
from llm_service.layers.linear.quantized_weight import GroupedWeight, Number, QuantizedWeight
from llm_service.models.quantization_config import Scheme
from tests import kernel_layout
from tests.random_weights import random_weight

BLOCKS = {"columns": 128, "rows": 128, "scale": torch.float32}
LIBRARY = functional.scaled_mm
LIBRARY_TRIAL, KERNEL_TRIAL = scaled_weight._is_right.__wrapped__, scaled_weight._are_right.__wrapped__


def on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def stand_in(a: Tensor, b: Tensor, scale_a: Tensor, how_a: Any, scale_b: Tensor, how_b: Any, **more: Any) -> Tensor:
    """The library checks shapes and strides of tensors without numbers as it does those of a GPU."""
    LIBRARY(on_meta(a), on_meta(b), on_meta(scale_a), how_a, on_meta(scale_b), how_b, **more)
    left, right = a.float(), b.float()
    if how_a == ScalingType.RowWise:
        return ((left * scale_a) @ (right * scale_b)).to(more["output_dtype"])
    groups = a.shape[1] // 128
    left = left * scale_a.repeat_interleave(128, 1)
    right = right * scale_b[:groups].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (left @ right).to(more["output_dtype"])


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are taken to have passed their trial, which interprets products of 4096 inputs."""
    torch.manual_seed(5)
    monkeypatch.setattr(functional, "scaled_mm", stand_in)
    monkeypatch.setattr(scaled_weight, "runs_on", lambda _: True)
    monkeypatch.setattr(scaled_weight, "_is_right", lambda *_: True)
    monkeypatch.setattr(scaled_weight, "_are_right", lambda *_: True)


@pytest.fixture
def tried(_library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has a trial of its own."""
    monkeypatch.setattr(scaled_weight, "_is_right", LIBRARY_TRIAL)
    monkeypatch.setattr(scaled_weight, "_are_right", KERNEL_TRIAL)


def scaled(weight: QuantizedWeight) -> ScaledWeight | None:
    grouped = GroupedWeight.of([weight])
    assert grouped is not None
    made = ScaledWeight.of(grouped, grouped.codes)
    assert made is None or made.codes.data_ptr() == grouped.codes.data_ptr(), "there is one copy"
    return made


def made_for_it(outputs: int, inputs: int, **how: Any) -> QuantizedWeight:
    return replace(random_weight(Number.E4M3, outputs, inputs, **how), rounds_inputs=True)


def check_rows(given: Tensor, x: Tensor, wide: Tensor) -> None:
    """Each row is x Wᵀ, however small it is: it has a scale of its own. Errors grow with what is summed, however much
    of that cancels out."""
    assert given.dtype == torch.bfloat16
    assert given.shape == (len(x), len(wide))
    summed = (x.float().square() @ wide.square().T).sqrt().norm(dim=1)
    assert ((given.float() - x.float() @ wide.T).norm(dim=1) <= 0.05 * summed).all()


def growing_rows(rows: int, inputs: int) -> Tensor:
    """bfloat16 [rows, inputs], the last ones 10⁸ times as large as the first."""
    return (torch.randn(rows, inputs) * torch.logspace(-4, 4, max(1, rows))[:rows].unsqueeze(1)).bfloat16()


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize(("blocks", "inputs"), [(True, 128), (True, 640), (True, 4992), (False, 176), (False, 5000)])
def test_rows_are_rounded_as_by_plain_operators(blocks: bool, inputs: int, by_group: bool) -> None:
    """Tiny and huge ones as well, with zeros behind them. (Triton's interpreter reads subnormal numbers wrongly.)"""
    if by_group and not blocks:
        pytest.skip("a row has one scale")
    x = growing_rows(7, inputs)
    x[0], x[1, : inputs // 2], x[2, 3], x[3] = 0, 0, 3e38, (0.1 + torch.rand(inputs)) * 1e-36
    numbers, scales = scaled_weight._rounded(x, blocks=blocks, rows=16, by_group=by_group)
    expected, steps = scaled_weight.rounded_plainly(x, 128 if blocks else inputs)
    assert torch.equal(numbers[:7].float(), expected.float())
    assert torch.equal(scales[:7], steps)
    assert scales.t().is_contiguous() == by_group or scales.shape[1] == 1
    assert not numbers[7:].float().any()


def test_a_row_with_what_is_no_number_has_no_scale() -> None:
    x = growing_rows(3, 256)
    x[0, 5], x[1, 200] = float("nan"), float("-inf")
    for blocks in (True, False):
        numbers, scales = scaled_weight._rounded(x, blocks=blocks, rows=3)
        found = (numbers.float().view(3, scales.shape[1], -1) * scales[:, :, None]).view(3, -1)
        lost = slice(0, 128) if blocks else slice(None)
        assert found[0, lost].isnan().all()
        assert found[1, 128:].isnan().all()
        assert found[2].isfinite().all()


@pytest.mark.parametrize(
    ("weight", "blocks"),
    [
        (made_for_it(256, 640, **BLOCKS), True),
        (made_for_it(48, 176, columns=176, scale=torch.bfloat16), False),
        (made_for_it(48, 176, columns=176, rows=48, scale=torch.float32), False),
    ],
    ids=["blocks", "a scale an output", "one scale"],
)
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_a_product_is_near_the_wide_weight_s(weight: QuantizedWeight, blocks: bool, rows: int) -> None:
    laid_out = scaled(weight)
    assert laid_out is not None
    assert laid_out.blocks == blocks
    x = growing_rows(rows, weight.inputs)
    x[0] = 0
    check_rows(laid_out.product(x), x, weight.wide())


@pytest.mark.parametrize(
    "weight",
    [
        made_for_it(200, 640, **BLOCKS),
        made_for_it(256, 600, **BLOCKS),
        made_for_it(256, 640, **BLOCKS, before=64),
        made_for_it(256, 640, columns=128, scale=torch.float32),
        made_for_it(40, 176, columns=176),
        random_weight(Number.E4M3, 256, 640, **BLOCKS),
        random_weight(Number.INT8, 256, 640, columns=640),
    ],
    ids=["outputs", "inputs", "cut", "groups of an output", "aligned", "16 bits", "int8"],
)
def test_what_does_not_fit_is_left_to_other_kernels(weight: QuantizedWeight) -> None:
    assert scaled(weight) is None


@pytest.mark.usefixtures("tried")
@pytest.mark.parametrize("how", [BLOCKS, {"columns": 640}], ids=["blocks", "a scale an output"])
def test_a_library_that_computes_it_passes_its_trial(how: dict[str, Any]) -> None:
    assert scaled(made_for_it(256, 640, **how)) is not None


@pytest.mark.usefixtures("tried")
@pytest.mark.parametrize("trouble", ["refused", "wrong", "short sums"])
def test_a_library_that_does_not_compute_it_is_left_out(trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any, **more: Any) -> Tensor:
        if trouble == "refused":
            raise RuntimeError("no such kernel\nat all")
        return (0.993 if trouble == "short sums" else 1.2) * stand_in(*given, **more)

    monkeypatch.setattr(functional, "scaled_mm", broken)
    assert scaled(made_for_it(256, 640, **BLOCKS)) is None


def test_many_rows_in_bfloat16_go_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = made_for_it(256, 384, **BLOCKS)
    laid_out = GpuWeight.of([weight])
    assert laid_out is not None
    monkeypatch.setattr(module, "_MANY", 4)
    calls: list[int] = []
    monkeypatch.setattr(ScaledWeight, "product", lambda _, x: calls.append(len(x)) or x.new_zeros(len(x), 256))
    laid_out.product(torch.randn(5, 384).bfloat16())
    laid_out.product(torch.randn(5, 384))
    laid_out.product(torch.randn(3, 384))
    assert calls == [5]


@pytest.mark.parametrize(
    "how",
    [BLOCKS, {"columns": 384, "scale": torch.bfloat16}, {"columns": 384, "rows": 200, "scale": torch.float32}],
    ids=["blocks", "a scale an output", "one scale"],
)
@pytest.mark.parametrize("counts", [(70, 0, 1, 9), (0, 0, 0, 200), (0, 0, 0, 0)], ids=str)
def test_experts_products_are_near_those_of_their_wide_weights(how: dict[str, Any], counts: tuple[int, ...]) -> None:
    weights = [made_for_it(200, 384, **how) for _ in counts]
    laid_out = GpuWeight.of_experts([[weight] for weight in weights]).scaled_experts
    assert laid_out is not None
    assert laid_out.blocks == (how is BLOCKS)
    rows = sum(counts)
    x = growing_rows(rows, 384)
    given = laid_out.product(x, torch.tensor(counts).cumsum(0).int())
    for weight, part, answer in zip(weights, x.split(counts), given.split(counts), strict=True):
        check_rows(answer, part, weight.wide())
    behind = torch.cat([x, torch.full((70, 384), torch.nan).bfloat16()])  # of other ranks' experts
    assert torch.equal(laid_out.product(behind, torch.tensor(counts).cumsum(0).int())[:rows], given)


@pytest.mark.parametrize(
    "weight",
    [
        made_for_it(256, 600, **BLOCKS),
        made_for_it(256, 640, **BLOCKS, before=64),
        made_for_it(256, 640, columns=64, scale=torch.float32),
        random_weight(Number.E4M3, 256, 640, **BLOCKS),
        random_weight(Number.INT8, 256, 640, columns=640),
    ],
    ids=["inputs", "cut", "small groups", "16 bits", "int8"],
)
def test_experts_that_do_not_fit_are_left_to_another_kernel(weight: QuantizedWeight) -> None:
    assert GpuWeight.of_experts([[weight], [weight]]).scaled_experts is None


@pytest.mark.usefixtures("tried")
@pytest.mark.parametrize("how", [BLOCKS, {"columns": 384}], ids=["blocks", "a scale an output"])
def test_the_kernel_of_experts_passes_its_trial(how: dict[str, Any]) -> None:
    assert GpuWeight.of_experts([[made_for_it(256, 384, **how)]]).scaled_experts is not None


@pytest.mark.usefixtures("tried")
@pytest.mark.parametrize("trouble", ["refused", "wrong"])
def test_a_compiler_that_cannot_make_the_kernel_leaves_experts_to_another(
    trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: ScaledExperts, x: Tensor, ends: Tensor) -> Tensor:
        if trouble == "refused":
            raise RuntimeError("no such type\nat all")
        numbers, steps = scaled_weight.rounded_plainly(x, 128)
        rows = (numbers.float() * steps.repeat_interleave(128, 1)).split(ends.diff(prepend=ends[:1] * 0).tolist())
        wide = self.codes.view(torch.float8_e4m3fn).float() * self.scale.repeat_interleave(128, 1).transpose(1, 2)
        return 1.2 * torch.cat([part @ each.T for part, each in zip(rows, wide, strict=True)]).bfloat16()

    monkeypatch.setattr(ScaledExperts, "product", broken)
    assert GpuWeight.of_experts([[made_for_it(256, 640, **BLOCKS)]]).scaled_experts is None


@pytest.mark.parametrize("layout", kernel_layout.LAYOUTS)
@pytest.mark.parametrize("how", [BLOCKS, {"columns": 384}], ids=["blocks", "outputs"])
def test_rows_need_not_lie_in_order(how: dict[str, Any], layout: str) -> None:
    weight = GroupedWeight.of([made_for_it(256, 384, **how)])
    assert weight is not None
    whole, experts = ScaledWeight.of(weight, weight.codes), ScaledExperts.of([weight], weight.codes.unsqueeze(0))
    assert whole is not None
    assert experts is not None
    x, ends = growing_rows(48, 384), torch.tensor([48]).int()
    turned = kernel_layout.LAYOUTS[layout](x)
    assert torch.equal(whole.product(turned), whole.product(x))
    assert torch.equal(experts.product(turned, ends), experts.product(x, ends))


def test_experts_with_many_rows_in_bfloat16_go_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    laid_out = GpuWeight.of_experts([[made_for_it(256, 384, **BLOCKS)] for _ in range(2)])
    calls: list[int] = []
    monkeypatch.setattr(ScaledExperts, "product", lambda _, x, ends: calls.append(len(x)) or x.new_zeros(len(x), 256))
    for rows, dtype in ((129, torch.bfloat16), (129, torch.float32), (128, torch.bfloat16)):
        laid_out.grouped_product(torch.randn(rows, 384).to(dtype), torch.tensor([rows - 2, rows]).int())
    assert calls == [129]


@pytest.mark.parametrize(
    ("stated", "rounds"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, Number.E4M3),
        ({"quant_method": "fp8", "activation_scheme": "static"}, None),
        ({"quant_method": "fp8"}, None),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, Number.E4M3),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, None),
        (("float", 8, True), Number.E4M3),
        (("float", 8, False), None),
        (("int", 8, True), Number.INT8),
        (("int", 8, True, "token", True), Number.INT8),
        (("int", 8, True, "token", False), None),
        (("int", 8, True, "tensor", True), None),
        (("int", 8, False), "stored"),
        (("int", 8, False, "tensor", True), "stored"),
        (("int", 8, False, "tensor", False), None),
        (("int", 8, False, "channel", True), None),
        (("int", 8, "local"), None),
        (("int", 4, True), None),
        (None, None),
    ],
    ids=str,
)
def test_checkpoints_say_whether_inputs_are_rounded(stated: Any, rounds: Number | str | None) -> None:
    """And whether by a scale that is stored."""
    if not isinstance(stated, dict):
        names = "type", "num_bits", "dynamic", "strategy", "symmetric"
        activations = None if stated is None else dict(zip(names, stated, strict=False))
        group = {"format": "float-quantized", "input_activations": activations}
        stated = {"quant_method": "compressed-tensors", "config_groups": {"a": group}}
    scheme = Scheme.of({"quantization_config": stated})
    assert scheme is not None
    assert (scheme.rounds_inputs, scheme.stored) == (Number.INT8 if rounds == "stored" else rounds, rounds == "stored")


@pytest.mark.parametrize(
    ("other", "rounds"),
    [({"format": "pack-quantized"}, Number.INT8), ({"format": "nvfp4-pack-quantized"}, Number.INT8), ({}, None)],
    ids=["words", "pairs", "bytes"],
)
def test_a_group_of_fewer_bits_does_not_keep_the_inputs_of_another_wide(
    other: dict[str, Any], rounds: Number | None
) -> None:
    """One whose weights look the same does, and the log says so."""
    inputs = {"type": "int", "num_bits": 8, "dynamic": True}
    groups = {"a": {"format": "int-quantized", "input_activations": inputs}, "b": {"format": "int-quantized"} | other}
    with capture_logs() as lines:
        scheme = Scheme.of({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}})
    assert scheme is not None
    assert scheme.rounds_inputs is rounds
    assert ["different things of their inputs" in line["event"] for line in lines] == ([] if rounds else [True])
