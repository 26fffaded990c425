"""Weights of 8 bits that are multiplied with rows of as many on a GPU, in Triton's interpreter: the rounding, the sums,
and that a row does not depend on its company."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from common.checkpoints.checkpoint import CheckpointError
from llm_service.layers.cpu.quad_panels import QuadPanels
from llm_service.layers.gpu import int8_weight as module
from llm_service.layers.gpu import launch
from llm_service.layers.gpu.int8_weight import Int8Weight, launch_for
from llm_service.layers.linear.quantized_weight import Number, QuantizedWeight, rounded_rows
from llm_service.layers.moe.sparse_mlp import SparseMLP
from llm_service.layers.tensor_parallel import ALONE
from llm_service.models.float_formats import EightBits
from llm_service.models.quantized import check_weight_dtype
from tests import kernel_layout
from tests.random_weights import random_weight

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def made_for_it(outputs: int, inputs: int, **how: Any) -> QuantizedWeight:
    how = {"columns": inputs, "scale": torch.float32} | how
    return replace(random_weight(Number.INT8, outputs, inputs, **how), rounds_inputs=True)


def on_gpu(*parts: QuantizedWeight, order: Tensor | None = None) -> Int8Weight:
    weight = Int8Weight.of([part.to(DEVICE) for part in parts], order)
    assert weight is not None
    return weight


def rows_of(count: int, inputs: int) -> Tensor:
    """float32 [count, inputs], the last ones 10⁶ times as large as the first, which is zero."""
    x = torch.randn(count, inputs) * torch.logspace(-3, 3, count).unsqueeze(1)
    x[0] = 0
    return x


def check(given: Tensor, x: Tensor, wide: Tensor, bias: Tensor | None = None) -> None:
    """It is the product of what rows are rounded to, but for the last bits."""
    numbers, scales = rounded_rows(x.float())
    rounded, added = numbers.double() * scales.double().unsqueeze(1), 0.0 if bias is None else bias.double()
    expected = rounded @ wide.double().T + added
    most = rounded.abs() @ wide.double().abs().T + (0.0 if bias is None else bias.double().abs())
    assert given.dtype == x.dtype
    precise = 1e-6 if x.dtype == torch.float32 else torch.finfo(x.dtype).eps
    assert ((given.cpu() - expected).abs() <= precise * (most + torch.finfo(x.dtype).smallest_normal)).all()


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [(torch.float32, 1), (torch.float32, 40), (torch.bfloat16, 5), (torch.bfloat16, 70), (torch.float16, 17)],
    ids=str,
)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (70, 100), (300, 531), (5, 3)])
def test_a_product_is_that_of_rounded_rows(outputs: int, inputs: int, rows: int, dtype: torch.dtype) -> None:
    weight, x = made_for_it(outputs, inputs), rows_of(rows, inputs)
    x = (x / 1000 if dtype == torch.float16 else x).to(dtype)
    bias = torch.randn(outputs).to(dtype)
    check(on_gpu(weight).product(x.to(DEVICE)), x, weight.wide())
    check(on_gpu(weight).product(x.to(DEVICE), bias.to(DEVICE)), x, weight.wide(), bias)


def test_rows_are_rounded_to_the_same_numbers_as_on_cpus() -> None:
    """Those half-way between two as well, of which there are many among whole numbers, the smallest, and rows that are
    rounded in several pieces."""
    for inputs in (203, 5000):
        x = torch.cat([torch.randn(40, inputs), torch.randint(-200, 200, (40, inputs)) / 2])
        x[0], x[1], x[2, 1:] = 0, torch.randn(inputs) * 1e-40, 0
        numbers, scales = rounded_rows(x)
        given = module._rounded(x.to(DEVICE))
        assert torch.equal(given[0].cpu(), numbers)
        assert torch.equal(given[1].cpu(), scales)


def test_inputs_are_rounded_by_the_scale_that_is_stored() -> None:
    """What is beyond it as far as 8 bits go, however far it is; other rows are as ever."""
    weight, x = replace(made_for_it(70, 101), input_scale=0.25), torch.randn(20, 101) * 10
    x[0, :4], x[1, 5] = torch.tensor([1e30, -1e30, 4e8, -4e8]), torch.nan
    numbers, scales = rounded_rows(x, 0.25)
    expected = (numbers.double() * scales.double().unsqueeze(1)) @ weight.wide().double().T
    given, rest = on_gpu(weight).product(x.to(DEVICE)).cpu(), [0, *range(2, 20)]
    assert given[1].isnan().all()
    torch.testing.assert_close(given.double()[rest], expected[rest], rtol=1e-6, atol=0.01)  # of sums up to 10⁵
    given = module._rounded(x.to(DEVICE), torch.tensor([0.25], device=DEVICE))[0].cpu()
    assert torch.equal(given[rest], numbers[rest])


def test_each_expert_may_have_an_input_scale_of_its_own() -> None:
    every = [[replace(made_for_it(30, 96), input_scale=scale) for _ in range(2)] for scale in (0.25, 0.5, 0.125)]
    weight = Int8Weight.of_experts([[part.to(DEVICE) for part in parts] for parts in every])
    assert weight is not None
    counts = 70, 0, 9
    x, ends = torch.randn(79, 96, device=DEVICE), torch.tensor(counts).cumsum(0).int().to(DEVICE)
    for parts, given, rows in zip(every, weight.grouped_product(x, ends).split(counts), x.split(counts), strict=True):
        assert torch.equal(given, on_gpu(*parts).product(rows))


@pytest.mark.parametrize("scale", [0.0, 0.25], ids=["own scales", "stored scales"])
@pytest.mark.parametrize("counts", [(3, 0, 40), (0, 0, 0), (20,)], ids=str)
def test_rows_of_other_ranks_experts_change_nothing(counts: tuple[int, ...], scale: float) -> None:
    every = [[replace(made_for_it(40, 96), input_scale=scale).to(DEVICE)] for _ in counts]
    weight, mine = Int8Weight.of_experts(every), sum(counts)
    assert weight is not None
    x, ends = rows_of(mine + 70, 96).to(DEVICE), torch.tensor(counts).cumsum(0).int().to(DEVICE)
    expected = weight.grouped_product(x[:mine], ends)
    x[mine:] = torch.nan
    assert torch.equal(weight.grouped_product(x, ends, 8 * len(counts))[:mine], expected)


def test_weights_whose_inputs_have_other_scales_are_apart() -> None:
    one, other = (replace(made_for_it(30, 96), input_scale=scale).to(DEVICE) for scale in (0.25, 0.5))
    own = made_for_it(30, 96).to(DEVICE)
    assert Int8Weight.of([one, other]) is None
    assert Int8Weight.of_experts([[one, other], [one, one]]) is None
    assert Int8Weight.of_experts([[one], [own]]) is None


def test_sums_are_exact() -> None:
    inputs = 65536
    numbers = torch.randint(-128, 128, (70, inputs), dtype=torch.int8)
    numbers[:2] = torch.tensor([[-128], [127]], dtype=torch.int8)
    weight = QuantizedWeight(Number.INT8, numbers.view(torch.uint8), inputs, torch.ones(70, 1), columns=inputs)
    x = torch.randint(-127, 128, (3, inputs)).float()
    x[0], x[1:, 0] = 127.5, 127.5  # a scale of 1
    given = on_gpu(replace(weight, rounds_inputs=True)).product(x.to(DEVICE)).cpu()
    assert torch.equal(given, (x.round().clamp(max=127).double() @ numbers.double().T).float())


def test_a_row_s_product_is_the_same_whatever_is_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By tiles of every size, with inputs that are split among several and such that are not."""
    monkeypatch.setattr(launch, "LEAST", 128)
    weight, bias = on_gpu(made_for_it(72, 600)), torch.randn(72).bfloat16().to(DEVICE)
    assert {launch_for(rows, 72, 600).splits for rows in (1, 17, 33, 65)} == {4, 1}
    x = rows_of(200, 600).bfloat16().to(DEVICE)
    alone = weight.product(x[7:8], bias)
    for together in (8, 16, 20, 33, 70, 200):
        assert torch.equal(weight.product(x[:together], bias)[7:8], alone)


def test_tiles_that_share_weights_are_all_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BESIDE", 3)
    weight, x = made_for_it(300, 64), rows_of(128 * 7 + 5, 64)
    check(on_gpu(weight).product(x.to(DEVICE)), x, weight.wide())


@pytest.mark.parametrize("other", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rows", [2, 70])
def test_what_is_not_a_number_stays_in_its_row(rows: int, other: float) -> None:
    x = torch.randn(rows, 100)
    x[1, 97] = other
    given = on_gpu(made_for_it(70, 100)).product(x.to(DEVICE)).cpu()
    assert given.isnan().all(1).tolist() == [False, True, *[False] * (rows - 2)]
    assert given[0].isfinite().all()


def test_parts_are_one_below_the_other_and_may_be_ordered() -> None:
    parts = [made_for_it(40, 96), made_for_it(100, 96, columns=96, rows=100)]
    x, order = rows_of(7, 96).to(DEVICE), torch.randperm(140)
    apart = torch.cat([on_gpu(part).product(x) for part in parts], dim=1)
    torch.testing.assert_close(on_gpu(*parts).product(x), apart, rtol=1e-6, atol=0)
    ordered = on_gpu(*parts, order=order).product(x)
    torch.testing.assert_close(ordered[:, order.to(DEVICE)], apart, rtol=1e-6, atol=0)


@pytest.mark.parametrize("inputs", [slice(0, 48), slice(48, 96)], ids=str)
@pytest.mark.parametrize("outputs", [slice(0, 40), slice(40, 70)], ids=str)
def test_a_rank_rounds_its_share_of_rows_by_their_own_largest_numbers(outputs: slice, inputs: slice) -> None:
    """As on CPUs: nothing is asked of other ranks."""
    numbers, scale = torch.randint(-128, 128, (70, 96), dtype=torch.int8), torch.rand(70, 1) + 0.5
    share = EightBits(Number.INT8, _Stored(numbers), _Stored(scale), rounds_inputs=Number.INT8)[outputs, inputs]
    x = rows_of(20, 96)[:, inputs]
    given = on_gpu(share).product(x.to(DEVICE))
    check(given, x, (numbers * scale)[outputs, inputs])
    if (panels := QuadPanels.of([share])) is not None:
        torch.testing.assert_close(given.cpu(), panels.product(x), rtol=1e-6, atol=1e-6 * float(given.abs().max()))


class _Stored:
    """A tensor in a file."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)


def test_no_rows_give_none() -> None:
    assert on_gpu(made_for_it(9, 32)).product(torch.empty(2, 0, 32, device=DEVICE)).shape == (2, 0, 9)


@pytest.mark.parametrize("layout", kernel_layout.LAYOUTS)
def test_rows_need_not_lie_in_order(layout: str) -> None:
    weight, x = on_gpu(made_for_it(70, 96)), rows_of(20, 96).to(DEVICE)
    assert torch.equal(weight.product(kernel_layout.LAYOUTS[layout](x)), weight.product(x))


@pytest.mark.parametrize("counts", [(3, 0, 40, 1, 0), (0, 0, 0, 0, 2), (0, 0, 0, 0, 0), (120, 0, 0, 400, 0)], ids=str)
def test_rows_of_each_expert_go_through_its_matrix(counts: tuple[int, ...]) -> None:
    every = [[made_for_it(40, 96), made_for_it(30, 96)] for _ in counts]
    weight = Int8Weight.of_experts([[part.to(DEVICE) for part in parts] for parts in every])
    assert weight is not None
    x, ends = rows_of(max(1, sum(counts)), 96)[: sum(counts)].bfloat16(), torch.tensor(counts).cumsum(0).int()
    given = weight.grouped_product(x.to(DEVICE), ends.to(DEVICE))
    assert given.shape == (sum(counts), 70)
    for parts, part, rows in zip(every, given.split(list(counts)), x.split(list(counts)), strict=True):
        check(part, rows, torch.cat([each.wide() for each in parts]))
        alone = Int8Weight.of([each.to(DEVICE) for each in parts])
        assert alone is not None
        assert torch.equal(part, alone.product(rows.to(DEVICE))), "company changes a bit"


def test_a_mixture_of_experts_is_nearly_the_one_that_it_was_rounded_from() -> None:
    layer = SparseMLP(4, 2, 64, 32, ALONE, torch.float32).requires_grad_(requires_grad=False).to(DEVICE)
    for parameter in layer.parameters():
        parameter.normal_(std=0.2)
    x = torch.randn(9, 64, device=DEVICE)
    weights, chosen = layer.gate(x).softmax(-1).topk(2, dim=-1)
    expected, every = layer._in_turn(x, weights, chosen), layer.experts._weights()
    layer.experts._stay_short(*([[QuantizedWeight.rounded(e, inputs=True)] for e in each] for each in every))
    assert all(isinstance(form, Int8Weight) for form in layer.experts.grouped or ())
    assert 0 < (layer._together(x, weights, chosen) - expected).norm() / expected.norm() < 0.03


@pytest.mark.parametrize(
    "weight",
    [
        random_weight(Number.INT8, 70, 96, columns=96),
        made_for_it(70, 96, zeros=True),
        made_for_it(70, 96, columns=32),
        replace(random_weight(Number.UINT8, 70, 96, columns=96), rounds_inputs=True),
        made_for_it(1, 1 << 17),
    ],
    ids=["inputs stay", "zeros", "groups", "no sign", "too many inputs"],
)
def test_what_does_not_fit_is_left_to_other_kernels(weight: QuantizedWeight) -> None:
    assert Int8Weight.of([weight.to(DEVICE)]) is None
    assert Int8Weight.of_experts([[weight.to(DEVICE)], [weight.to(DEVICE)]]) is None


def test_experts_of_which_one_does_not_fit_are_left_to_another_kernel() -> None:
    every = [[made_for_it(70, 96)], [made_for_it(70, 96, columns=32)]]
    assert Int8Weight.of_experts([[part.to(DEVICE) for part in parts] for parts in every]) is None


@pytest.mark.parametrize("trouble", ["refused", "wrong"])
@pytest.mark.parametrize("what", ["product", "grouped_product"])
def test_a_compiler_that_cannot_make_the_kernels_leaves_weights_to_others(
    what: str, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(Int8Weight, what)

    def broken(self: Int8Weight, *given: Any) -> Tensor:
        if trouble == "refused":
            raise RuntimeError("no such type\nat all")
        return 1.02 * right(self, *given)

    module._is_right.cache_clear()
    monkeypatch.setattr(Int8Weight, what, broken)
    assert Int8Weight.of([made_for_it(70, 96).to(DEVICE)]) is None
    module._is_right.cache_clear()


def test_rounding_is_refused_where_the_kernels_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for right in (True, False):
        monkeypatch.setattr(module, "_is_right", lambda _, right=right: right)
        with nullcontext() if right else pytest.raises(CheckpointError, match="w8a8 is for our kernels"):
            check_weight_dtype("w8a8", None, torch.device("cuda"))


def test_it_stays_as_small_as_its_numbers() -> None:
    weight = made_for_it(256, 1024)
    assert on_gpu(weight).nbytes == weight.nbytes
