"""Quantised weights on a GPU: products in all types beside the long form's, captured, and whole checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.quantized import FORMS as TIMED
from common.checkpoints.checkpoint import Checkpoint
from common.gpu.graphs import CudaCapture
from llm_service.layers.gpu import int8_weight, quantized_weight
from llm_service.layers.gpu.int8_weight import Int8Weight
from llm_service.layers.gpu.quantized_weight import GpuWeight
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.linear.quantized_weight import Number, QuantizedWeight, rounded_rows
from llm_service.layers.moe.experts import Experts
from llm_service.models.loader import load_decoder
from llm_service.request import SamplingParams
from llm_service.worker.weights import describe
from testkit import reference
from testkit.checkpoints import Family
from testkit.local_engine import LocalEngine, make_prompt
from tests import pictures
from tests.random_weights import experts, random_weight
from tools.models.w8a8 import W8A8

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
GREEDY = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
WEIGHTS = [
    random_weight(Number.INT8, 4096, 4096, columns=4096, scale=torch.float32),
    random_weight(Number.UINT8, 1024, 4000, columns=128, zeros=True),
    random_weight(Number.UINT8, 1024, 4000, columns=32, before=16, zeros=True),
    random_weight(Number.E4M3, 1000, 4096, columns=128, rows=128, scale=torch.float32),
    random_weight(Number.UINT4, 4096, 4096, columns=128, zeros=True),
    random_weight(Number.UINT4, 300, 1001, columns=64, scale=torch.bfloat16),
    random_weight(Number.E2M1, 1024, 4096, columns=16, scale=torch.float8_e4m3fn),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("weight", WEIGHTS, ids=lambda each: f"{each.number.value} {each.columns} {each.inputs}")
def test_products_of_any_number_of_rows(weight: QuantizedWeight, dtype: torch.dtype) -> None:
    laid_out, wide = GpuWeight.of([weight.to(CUDA)]), weight.wide().to(CUDA).double()
    assert laid_out is not None
    assert laid_out.few, "the kernel fails its trial, and another way is what is tested"
    precise = dtype == torch.float32
    torch.testing.assert_close(
        laid_out.wide(dtype).double(), wide, rtol=1e-6 if precise else 2**-7, atol=0 if precise else 1e-3
    )
    for rows in (1, 7, 16, 17, 40, 200, 300):
        x = torch.randn(rows, weight.inputs, device=CUDA).to(dtype)
        expected, most = x.double() @ wide.T, x.double().abs() @ wide.abs().T
        error = (laid_out.product(x).double() - expected).abs()
        assert (error <= (2e-6 if precise else 2**-7) * most).all(), rows
        assert error.norm() / expected.norm() < (1e-5 if precise else 6e-3), rows


def replayed(weight: GpuWeight | Int8Weight, x: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, ...]:
    """What a graph of a grouped product gives, the rows of each expert apart."""
    ends = torch.tensor(counts, device=CUDA).cumsum(0).int()
    out = torch.empty(len(x), weight.codes.shape[1], dtype=x.dtype, device=CUDA)

    def run() -> None:
        out.copy_(weight.grouped_product(x, ends))

    with torch.inference_mode():
        run()
        replay = CudaCapture(CUDA)(run)
        out.zero_()
        replay()
    return out.split(list(counts))


@pytest.mark.parametrize("few", [True, False], ids=["kernel", "widened"])
@pytest.mark.parametrize("number", [Number.UINT4, Number.E4M3, Number.INT8])
@pytest.mark.parametrize("counts", [(3, 0, 40, 1, 0), (0, 0, 0, 0, 2), (500, 0, 1, 2000, 30)], ids=str)
def test_rows_of_experts_captured(
    number: Number, counts: tuple[int, ...], few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_weight, "_OF_EXPERTS_AT_ONCE", 2 * 768 * 1024)
    every = experts(number, len(counts), 768, 1024)
    weight = GpuWeight.of_experts([[part.to(CUDA) for part in parts] for parts in every])
    assert weight.few, "the kernel fails its trial"
    weight = replace(weight, few=few)
    x = torch.randn(sum(counts), 1024, device=CUDA).bfloat16()
    for parts, given, rows in zip(every, replayed(weight, x, counts), x.split(list(counts)), strict=True):
        if len(rows):
            wide = torch.cat([each.wide() for each in parts]).to(CUDA).double()
            expected = rows.double() @ wide.T
            assert (given.double() - expected).norm() / expected.norm() < 6e-3


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="before Hopper")
@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (1, 1024)], ids=["blocks", "outputs"])
def test_many_rows_are_multiplied_in_8_bits_on_both_sides(rows: int, columns: int) -> None:
    weight = random_weight(Number.E4M3, 768, 1024, columns=columns, rows=rows, scale=torch.float32)
    laid_out = GpuWeight.of([replace(weight, rounds_inputs=True).to(CUDA)])
    assert laid_out is not None
    assert laid_out.scaled is not None, "the library has no such product"
    wide = weight.wide().to(CUDA).double()
    for count in (257, 1000):
        x = torch.randn(count, 1024, device=CUDA).bfloat16()
        expected = x.double() @ wide.T
        assert 6e-3 < (laid_out.product(x).double() - expected).norm() / expected.norm() < 0.05


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="before Hopper")
@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (1, 1024)], ids=["blocks", "outputs"])
def test_many_rows_of_experts_are_multiplied_in_8_bits_on_both_sides(rows: int, columns: int) -> None:
    how = {"columns": columns, "rows": rows, "scale": torch.float32}
    each = [replace(random_weight(Number.E4M3, 768, 1024, **how), rounds_inputs=True).to(CUDA) for _ in range(5)]
    laid_out = GpuWeight.of_experts([[weight] for weight in each])
    assert laid_out.scaled_experts is not None, "our kernel does not compile here"
    counts = (300, 0, 1, 63, 900)
    x = torch.randn(sum(counts), 1024, device=CUDA).bfloat16()
    for weight, given, part in zip(each, replayed(laid_out, x, counts), x.split(counts), strict=True):
        if len(part):
            expected = part.double() @ weight.wide().double().T
            assert 6e-3 < (given.double() - expected).norm() / expected.norm() < 0.05


def in_whole_numbers(outputs: int, inputs: int) -> QuantizedWeight:
    weight = random_weight(Number.INT8, outputs, inputs, columns=inputs, scale=torch.float32)
    return replace(weight, rounds_inputs=True)


def rounded_product(x: Tensor, wide: Tensor, scale: float = 0.0) -> Tensor:
    """float64 [rows, outputs]: of what a row is rounded to on CPUs."""
    numbers, scales = rounded_rows(x.float().cpu(), scale)
    return (numbers.double() * scales.double().unsqueeze(1)).to(CUDA) @ wide.to(CUDA).double().T


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (1024, 12288), (1000, 4004), (24576, 4096), (37, 75)])
def test_rounded_rows_are_multiplied_in_whole_numbers(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """A row's product is what it is on CPUs, and the same to the bit in any company: in steps of a few rows, whose
    inputs are split, and of many."""
    weight = in_whole_numbers(outputs, inputs)
    laid_out, wide = Int8Weight.of([weight.to(CUDA)]), weight.wide()
    assert laid_out is not None, "our kernels do not compile here"
    x, bias = torch.randn(600, inputs, device=CUDA).to(dtype) / 64, torch.randn(outputs, device=CUDA).to(dtype)
    expected = rounded_product(x, wide) + bias.double()
    most = x.double().abs() @ wide.to(CUDA).double().abs().T + bias.double().abs()
    whole = laid_out.product(x, bias)
    precise = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert ((whole.double() - expected).abs() <= precise * most).all()
    for rows in (1, 7, 16, 17, 32, 33, 64, 65, 300):
        assert torch.equal(laid_out.product(x[:rows], bias), whole[:rows]), rows


def test_rows_are_rounded_as_on_cpus() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.cat([torch.randn(300, 5001), torch.randint(-200, 200, (300, 5001)) / 2]).to(dtype)
        x[0], x[1, 3] = 0, torch.inf
        numbers, scales = rounded_rows(x.float())
        given = int8_weight._rounded(x.to(CUDA))
        finite = scales.isfinite()
        assert torch.equal(given[0].cpu()[finite], numbers[finite])
        assert torch.equal(given[1].cpu()[finite], scales[finite])
        assert given[1].isnan().tolist() == scales.isnan().tolist()


def test_rows_are_rounded_by_the_scales_that_are_stored() -> None:
    x, ends = torch.randn(300, 5001) * 10, torch.tensor([100, 100, 300], dtype=torch.int32, device=CUDA)
    x[0, 0], x[299, 1] = 1e30, -1e30
    numbers = [rounded_rows(rows, scale)[0] for rows, scale in ((x[:100], 0.25), (x[100:], 0.0625))]
    given, scales = int8_weight._rounded(x.to(CUDA), torch.tensor([0.25, 0.5, 0.0625], device=CUDA), ends)
    assert torch.equal(given.cpu(), torch.cat(numbers))
    assert scales.tolist() == [0.25] * 100 + [0.0625] * 200


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("counts", [(3, 0, 40, 1, 0), (0, 0, 0, 0, 2), (500, 0, 1, 2000, 30)], ids=str)
def test_rounded_rows_of_experts_captured(counts: tuple[int, ...], stored: bool) -> None:
    scales = [0.03 + 0.01 * number if stored else 0.0 for number in range(len(counts))]
    every = [replace(in_whole_numbers(768, 1024), input_scale=scale) for scale in scales]
    weight = Int8Weight.of_experts([[each.to(CUDA)] for each in every])
    assert weight is not None, "our kernels do not compile here"
    x = torch.randn(sum(counts), 1024, device=CUDA).bfloat16()
    for each, given, rows in zip(every, replayed(weight, x, counts), x.split(list(counts)), strict=True):
        if len(rows):
            alone = Int8Weight.of([each.to(CUDA)])
            assert alone is not None
            assert torch.equal(given, alone.product(rows)), "company changes a bit"
            expected = rounded_product(rows, each.wide(), each.input_scale)
            assert (given.double() - expected).norm() / expected.norm() < 6e-3


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe"])
def test_layers_of_checkpoints_in_w8a8_are_computed_so(
    family: Family, checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    from tests.quantized import FORMATS, quantize_checkpoint

    folder, _ = quantize_checkpoint(checkpoints(family), FORMATS["int-quantized"], tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": W8A8}))
    decoder = load_decoder(Checkpoint(folder), torch.bfloat16, CUDA)
    forms = [part.laid_out for part in decoder.layers.modules() if isinstance(part, PackedLinear)]
    forms += [form for part in decoder.modules() if isinstance(part, Experts) for form in part.grouped or ()]
    assert all(isinstance(form, Int8Weight) for form in forms)
    assert describe(decoder, "compressed-tensors").inputs == "int8"
    prompt = make_prompt(folder, [pictures.photograph("astronaut"), "What is in the picture?"])
    outcomes = LocalEngine(folder, device="cuda:0").run([prompt, prompt], GREEDY)
    assert [len(outcome.tokens) for outcome in outcomes] == [32, 32]


@pytest.mark.parametrize("form", TIMED)
def test_a_row_is_the_same_whatever_few_rows_are_beside_it(form: str) -> None:
    weight = GpuWeight.of([TIMED[form](torch.randn(1024, 2048, device=CUDA))])
    assert weight is not None
    x = torch.randn(16, 2048, device=CUDA).bfloat16()
    assert torch.equal(weight.product(x)[:3], weight.product(x[:3]))


@pytest.mark.parametrize(
    ("family", "form"),
    [("qwen3_vl", "fp8 in blocks"), ("qwen3_vl", "awq"), ("qwen3_vl_moe", "fp8 in blocks"), ("qwen3_5", "gptq")],
)
def test_greedy_tokens_are_the_references(
    family: Family, form: str, checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    from tests.quantized import FORMATS, quantize_checkpoint

    quantized, wide = quantize_checkpoint(checkpoints(family), FORMATS[form], tmp_path)
    prompts = [
        make_prompt(wide, [pictures.photograph("astronaut"), "What is in the picture?"]),
        make_prompt(wide, ["Tell me about two red circles."]),
    ]
    expected = [reference.reference_generate(wide, prompt.inputs, 32) for prompt in prompts]
    for step_tokens in (4096, 16):
        engine = LocalEngine(quantized, step_tokens=step_tokens, device="cuda:0")
        assert [outcome.tokens for outcome in engine.run(prompts, GREEDY)] == expected
