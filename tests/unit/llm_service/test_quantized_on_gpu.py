"""The form of quantised weights for GPUs, in Triton's interpreter: beside what the libraries make of the weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from llm_service.layers.gpu import launch
from llm_service.layers.gpu import quantized_weight as module
from llm_service.layers.gpu.kernel_trial import gives
from llm_service.layers.gpu.quantized_weight import GpuWeight, launch_for
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.linear.quantized_weight import Number, QuantizedWeight
from llm_service.layers.moe.experts import Experts
from llm_service.layers.moe.sparse_mlp import SparseMLP
from llm_service.layers.tensor_parallel import ALONE
from tests.random_weights import experts, random_weight
from tests.unit.llm_service.test_quantized import quantised

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


def on_gpu(*parts: QuantizedWeight, order: Tensor | None = None) -> GpuWeight:
    weight = GpuWeight.of([part.to(DEVICE) for part in parts], order)
    assert weight is not None
    return weight


def check(weight: GpuWeight, wide: Tensor, rows: int, dtype: torch.dtype = torch.float32) -> None:
    """Its product is the one with the long form, but for what rounding does to the sums' parts."""
    x, bias = torch.randn(rows, wide.shape[1]).to(dtype), torch.randn(len(wide)).to(dtype)
    given = weight.product(x.to(DEVICE), bias.to(DEVICE)).cpu()
    assert given.dtype == dtype
    expected, most = x.float() @ wide.T + bias.float(), x.float().abs() @ wide.abs().T + bias.float().abs()
    assert ((given.float() - expected).abs() <= (1e-6 if dtype == torch.float32 else 2e-3) * most).all()


@pytest.mark.parametrize(
    "form",
    [
        "fp8 in ragged blocks",
        "float-quantized, one scale",
        "int-quantized, with zeros",
        "pack-quantized",
        "pack-quantized, 8 bits",
        "nvfp4",
        "awq",
        "gptq in order of importance",
        "modelopt FP8",
        "modelopt NVFP4",
        "modelopt MXFP8",
        "modelopt W4A8_MXFP4_FP8",
    ],
)
def test_a_product_is_that_with_the_wide_weight(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized = quantised(form, 72)
    weight, wide = on_gpu(quantized), quantized.wide()
    torch.testing.assert_close(weight.wide(torch.float32).cpu(), wide, rtol=1e-6, atol=0)
    check(weight, wide, 1)
    check(weight, wide, 17, torch.float16)
    monkeypatch.setattr(module, "_MANY", 4)
    check(weight, wide, 5)


@pytest.mark.parametrize(
    ("weight", "tile"),
    [
        (random_weight(Number.UINT4, 72, 384, columns=128, zeros=True), 128),
        (random_weight(Number.UINT4, 72, 321, columns=128, before=64), 64),
        (random_weight(Number.UINT8, 72, 160, columns=32, zeros=True), 32),
        (random_weight(Number.UINT8, 72, 160, columns=96, before=64, zeros=True), 32),
        (random_weight(Number.E4M3, 200, 300, columns=128, rows=128, scale=torch.float32), 128),
        (random_weight(Number.E4M3, 200, 300, columns=128, rows=128, before=17, scale=torch.bfloat16), 0),
        (random_weight(Number.E2M1, 72, 160, columns=16, scale=torch.float8_e4m3fn), 0),
        (replace(random_weight(Number.UINT4, 72, 64, columns=64, zeros=True), divisor=3.0), 128),
        (random_weight(Number.NF4, 72, 192, columns=64, scale=torch.float32), 64),
        (random_weight(Number.FP4, 72, 192, columns=64, before=32, scale=torch.float32), 32),
        (random_weight(Number.NF4, 72, 64, columns=64, scale=torch.float32), 128),
    ],
    ids=lambda each: each.number.value if isinstance(each, QuantizedWeight) else str(each),
)
@pytest.mark.parametrize("rows", [1, 20, 70])
def test_groups_of_the_sizes_that_checkpoints_have(weight: QuantizedWeight, tile: int, rows: int) -> None:
    """A tile of inputs lies in one group, but where groups are too small, or cut at odd places."""
    laid_out = on_gpu(weight)
    assert (laid_out.tile if laid_out.columns else 0) == tile
    check(laid_out, weight.wide(), rows)


@pytest.mark.parametrize(
    ("weight", "largest"),
    [
        (random_weight(Number.E2M1, 72, 160, columns=16, scale=torch.float8_e4m3fn), 1.5),
        (random_weight(Number.E2M1, 72, 160, columns=16, scale=torch.float8_e4m3fn), 448.0),
        (random_weight(Number.E2M1, 72, 160, columns=32, before=5, scale=torch.float32), 1e-2),
        (random_weight(Number.E4M3, 200, 300, columns=128, rows=128, before=17, scale=torch.float32), 1e-5),
    ],
    ids=lambda each: each.number.value if isinstance(each, QuantizedWeight) else str(each),
)
def test_weights_in_small_or_odd_groups_are_as_precise_as_others_in_float16(
    weight: QuantizedWeight, largest: float
) -> None:
    """Which has fewer exponents than a product of a number and its scale may have."""
    scales = (torch.rand(weight.scale.shape) * largest).to(weight.scale.dtype)
    weight = replace(weight, scale=scales)
    laid_out, x = on_gpu(weight), torch.randn(7, weight.inputs).half()
    assert laid_out.columns == 0
    expected = x.double() @ weight.wide().double().T
    given = laid_out.product(x.to(DEVICE)).cpu().double()
    assert (given - expected).norm() / expected.norm() < 5e-4


def test_a_long_sum_of_few_rows_is_split_alike_for_any_number_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch_for(1, 4096, 4096, 128) == launch_for(16, 4096, 4096, 128)
    assert [launch_for(1, *sides, 128).splits for sides in ((4096, 4096), (1024, 4096), (64, 8192))] == [4, 4, 8]
    assert launch_for(70, 4096, 4096, 128).splits == 1
    monkeypatch.setattr(launch, "LEAST", 128)
    weight = random_weight(Number.UINT4, 40, 600, columns=128, zeros=True)
    assert launch_for(1, 40, 600, 128).splits == 4
    laid_out = on_gpu(weight)
    check(laid_out, weight.wide(), 2)
    x = torch.randn(16, 600, device=DEVICE)
    assert torch.equal(laid_out.product(x)[:3], laid_out.product(x[:3]))


def test_parts_are_put_together_in_an_order() -> None:
    parts = [replace(random_weight(Number.UINT4, size, 96, columns=32), divisor=size) for size in (24, 9)]
    order = torch.randperm(33)
    wide = torch.cat([part.wide() for part in parts])[order.argsort()]
    torch.testing.assert_close(on_gpu(*parts, order=order).wide(torch.float32).cpu(), wide, rtol=1e-6, atol=0)
    other = random_weight(Number.UINT8, 9, 96, columns=32)
    assert GpuWeight.of([parts[0].to(DEVICE), other.to(DEVICE)]) is None


def test_no_rows_give_none() -> None:
    assert on_gpu(random_weight(Number.INT8, 9, 32, columns=32)).product(torch.empty(2, 0, 32)).shape == (2, 0, 9)


@pytest.mark.parametrize(
    "weight",
    [
        random_weight(Number.UINT4, 256, 1024, columns=128, zeros=True),
        random_weight(Number.E4M3, 256, 1024, columns=128, rows=128, scale=torch.float32),
        random_weight(Number.E2M1, 256, 1024, columns=16, scale=torch.float8_e4m3fn),
    ],
    ids=lambda each: each.number.value,
)
def test_it_stays_as_small_as_its_format(weight: QuantizedWeight) -> None:
    assert on_gpu(weight).nbytes <= 1.1 * weight.nbytes


@pytest.mark.parametrize("number", [Number.UINT4, Number.E4M3, Number.NF4])
@pytest.mark.parametrize("counts", [(3, 0, 40, 1, 0), (0, 0, 0, 0, 2), (1, 1, 1, 1, 1), (120, 0, 0, 200, 0)], ids=str)
def test_rows_of_each_expert_go_through_its_matrix(number: Number, counts: tuple[int, ...]) -> None:
    """Of experts without rows, with more than fit a tile, and of a number that is no power of two."""
    every = experts(number, len(counts), 48, 96)
    weight = GpuWeight.of_experts([[part.to(DEVICE) for part in parts] for parts in every])
    x = torch.randn(sum(counts), 96)
    ends = torch.tensor(counts).cumsum(0).int()
    given = weight.grouped_product(x.to(DEVICE), ends.to(DEVICE)).cpu()
    for parts, part, rows in zip(every, given.split(list(counts)), x.split(list(counts)), strict=True):
        wide = torch.cat([each.wide() for each in parts])
        assert ((part - rows @ wide.T).abs() <= 1e-6 * (rows.abs() @ wide.abs().T)).all()


@pytest.mark.parametrize("counts", [(3, 0, 40), (0, 0, 0), (20,)], ids=str)
def test_rows_of_other_ranks_experts_change_nothing(counts: tuple[int, ...]) -> None:
    every, mine = experts(Number.UINT4, len(counts), 48, 96), sum(counts)
    weight = GpuWeight.of_experts([[part.to(DEVICE) for part in parts] for parts in every])
    x, ends = torch.randn(mine + 70, 96, device=DEVICE), torch.tensor(counts).cumsum(0).int().to(DEVICE)
    expected = weight.grouped_product(x[:mine], ends)
    x[mine:] = torch.nan
    given = weight.grouped_product(x, ends, 8 * len(counts))[:mine]
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)  # tiles are of another size


def test_how_many_rows_an_expert_has_counts_experts_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    every = experts(Number.UINT4, 2, 48, 96)
    weight = GpuWeight.of_experts([[part.to(DEVICE) for part in parts] for parts in every])
    x, ends, asked = torch.randn(64, 96, device=DEVICE), torch.tensor([3, 8]).int().to(DEVICE), list[int]()
    monkeypatch.setattr(module, "launch_for", lambda rows, *more: asked.append(rows) or launch_for(rows, *more))
    weight.grouped_product(x, ends)
    weight.grouped_product(x, ends, 16)
    assert asked == [32, 4]


def test_experts_that_are_quantised_in_different_ways_are_refused() -> None:
    every = experts(Number.UINT4, 2, 48, 96) + experts(Number.E4M3, 1, 48, 96)
    with pytest.raises(ValueError, match="not quantised alike"):
        GpuWeight.of_experts([[part.to(DEVICE) for part in parts] for parts in every])


def test_a_mixture_in_8_bits_is_nearly_the_one_that_it_was_rounded_from() -> None:
    layer = SparseMLP(4, 2, 64, 32, ALONE, torch.float32).requires_grad_(requires_grad=False).to(DEVICE)
    for parameter in layer.parameters():
        parameter.normal_(std=0.2)
    x = torch.randn(9, 64, device=DEVICE)
    weights, chosen = layer.gate(x).softmax(-1).topk(2, dim=-1)
    expected = layer._in_turn(x, weights, chosen)
    layer.experts._stay_short(*([[QuantizedWeight.rounded(e)] for e in each] for each in layer.experts._weights()))
    assert not layer.experts.gate_up_proj.numel()
    given = layer._together(x, weights, chosen)
    assert 0 < (given - expected).norm() / expected.norm() < 0.02


def test_nothing_long_is_left_of_what_is_quantised_when_it_goes_to_a_device() -> None:
    linear = PackedLinear(slice(0, 32), {"a": slice(0, 8), "b": slice(0, 4)}, bias=False, dtype=torch.float32)
    every = Experts(2, 32, 8, ALONE, torch.float32)
    shapes = {"a": (8, 32), "b": (4, 32), "gate_proj": (8, 32), "up_proj": (8, 32), "down_proj": (32, 8)}
    for owner in (linear, every):
        assert sum(parameter.numel() for parameter in owner.parameters())
        for name, place in owner.targets("").items():
            if name.endswith(".weight") and not owner.whole():  # some have several names
                shape = next(shapes[part] for part in name.split(".") if part in shapes)
                place(_Stored(random_weight(Number.UINT4, *shape, columns=8)))
        assert owner.whole()
        assert not sum(parameter.numel() for parameter in owner.parameters())


class _Stored:
    """A tensor in a file, which is read as a whole."""

    def __init__(self, weight: QuantizedWeight) -> None:
        self._weight = weight

    def __getitem__(self, _: object) -> QuantizedWeight:
        return self._weight

    def get_shape(self) -> list[int]:
        return list(self._weight.shape)


@pytest.mark.parametrize("form", ["awq", "nvfp4", "fp8 in ragged blocks", "gptq in order of importance"])
def test_where_a_kernel_is_wrong_few_rows_are_multiplied_with_the_widened_weight(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a compiler makes wrong code of it for one kind of GPU."""
    quantized = quantised(form, 72)
    weight, run = on_gpu(quantized), GpuWeight._run
    assert module.few_are_right(weight, torch.float16)
    monkeypatch.setattr(GpuWeight, "_run", lambda *given: run(*given) * 1.1)
    assert not module.few_are_right(weight, torch.float16)
    check(replace(weight, few=False), quantized.wide(), 5)


@pytest.mark.parametrize("number", [Number.UINT4, Number.E4M3, Number.NF4])
@pytest.mark.parametrize("count", [1, 5])
def test_where_a_kernel_is_wrong_rows_of_experts_are_multiplied_with_widened_weights(
    number: Number, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = [[part.to(DEVICE) for part in parts] for parts in experts(number, count, 48, 96)]
    weight, run = GpuWeight.of_experts(every), GpuWeight._run
    assert module.experts_are_right(weight, torch.float16)
    monkeypatch.setattr(GpuWeight, "_run", lambda own, x, ends, *more: run(own, x, (ends - 1).clamp(min=0), *more))
    assert not module.experts_are_right(weight, torch.float16)


@pytest.mark.parametrize("counts", [(3, 0, 40, 1, 0), (0, 0, 0, 0, 2), (0, 0, 0, 0, 0), (20,)], ids=str)
@pytest.mark.parametrize("at_once", [1, 2, 1 << 20])
def test_widened_weights_of_experts_are_multiplied_some_at_a_time(
    counts: tuple[int, ...], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows behind those of all experts, which are other ranks', change nothing."""
    monkeypatch.setattr(module, "_OF_EXPERTS_AT_ONCE", at_once * 48 * 96)
    every, mine = experts(Number.UINT4, len(counts), 48, 96), sum(counts)
    weight = replace(GpuWeight.of_experts([[part.to(DEVICE) for part in parts] for parts in every]), few=False)
    x, ends = torch.randn(mine + 7, 96, device=DEVICE), torch.tensor(counts).cumsum(0).int().to(DEVICE)
    x[mine:] = torch.nan
    given = weight.grouped_product(x, ends)
    for parts, part, rows in zip(every, given[:mine].split(list(counts)), x[:mine].split(list(counts)), strict=True):
        wide = torch.cat([each.wide() for each in parts]).to(DEVICE)
        assert ((part - rows @ wide.T).abs() <= 1e-6 * (rows.abs() @ wide.abs().T)).all()
    assert weight.grouped_product(x[:0], ends * 0).shape == (0, weight.outputs)


def test_a_trial_for_which_memory_is_short_says_nothing_of_a_kernel() -> None:
    def full() -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        gives("products", full, torch.ones(1), 0.1)
    assert gives("products", lambda: torch.zeros(1), torch.zeros(1), 0.1)
    assert not gives("products", lambda: torch.ones(1), torch.zeros(1), 0.1)
