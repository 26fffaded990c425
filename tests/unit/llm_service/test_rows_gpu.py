"""The decoder's small kernels in Triton's interpreter: each against torch, and whole decoders with and without them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from llm_service.layers.cpu import layer
from llm_service.layers.gpu import row_ops as rows_gpu
from llm_service.layers.moe.experts import Experts
from llm_service.layers.moe.sparse_mlp import SparseMLP
from testkit.checkpoints import Family
from tests import kernel_layout, row_cases

each_type = pytest.mark.parametrize("dtype", row_cases.TYPES, ids=str)


@each_type
@pytest.mark.parametrize(("rows", "size"), row_cases.NORMS)
def test_a_norm_is_torch_s(rows: int, size: int, dtype: torch.dtype) -> None:
    row_cases.check_norm(rows_gpu, rows, size, dtype, "cpu")


@each_type
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("queries", "keys", "head", "rotary"), row_cases.HEADS)
def test_queries_and_keys_are_normed_and_turned_as_by_torch(
    queries: int, keys: int, head: int, rotary: int, normed: bool, dtype: torch.dtype
) -> None:
    row_cases.check_qk_norm_rotary(rows_gpu, queries, keys, head, rotary, dtype, "cpu", normed=normed)


@pytest.mark.parametrize("layout", kernel_layout.LAYOUTS)
@pytest.mark.parametrize("call", row_cases.CALLS)
def test_tensors_need_not_lie_in_order(call: str, layout: str) -> None:
    """An index of blocks cuts its angles from those of its layer, where they are longer."""
    row_cases.check_layouts(rows_gpu, call, layout, "cpu")


@each_type
@pytest.mark.parametrize("inner", row_cases.GATES)
def test_a_gate_is_torch_s(inner: int, dtype: torch.dtype) -> None:
    row_cases.check_gates(rows_gpu, inner, dtype, "cpu")


@pytest.mark.parametrize(
    ("rows", "experts", "per_token", "dtype"),
    [  # more choices than are looked at at once in one type: what counts them sees no other number
        (*route, dtype)
        for route in row_cases.ROUTES
        for dtype in row_cases.TYPES
        if dtype == torch.bfloat16 or math.prod(route[::2]) < 1024
    ],
    ids=str,
)
def test_rows_go_to_the_experts_that_torch_sends_them_to(
    rows: int, experts: int, per_token: int, dtype: torch.dtype
) -> None:
    row_cases.check_routes(rows_gpu, rows, experts, per_token, dtype, "cpu")


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_row_that_is_not_finite_breaks_no_other() -> None:
    row_cases.check_routes_of_broken_rows(rows_gpu, "cpu")


@pytest.mark.parametrize(
    "family", [*(pytest.param(family, marks=pytest.mark.soak) for family in ("qwen2_5_vl", "qwen3_vl")), "qwen3_vl_moe"]
)
def test_decoders_give_the_same_tokens_with_the_kernels(
    family: Family, checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints(family)
    monkeypatch.setattr(layer.FewRows, "of", lambda _: None)  # few rows on a CPU would go another way
    monkeypatch.setattr(Experts, "run_grouped", _one_by_one)
    monkeypatch.setattr(SparseMLP, "_in_turn", SparseMLP._together)
    expected = row_cases.greedy_tokens(folder)
    used: set[str] = set()
    for name in rows_gpu.__all__:
        monkeypatch.setattr(rows_gpu, name, _noted(name, getattr(rows_gpu, name), used))
    monkeypatch.setattr(layer, "NumbaOps", lambda _: rows_gpu)
    assert row_cases.greedy_tokens(folder) == expected
    mixed = {"route", "sort_by_expert", "weighted_sum"}
    assert used == set(rows_gpu.__all__) - {"gelu_and_mul"} - (set() if family == "qwen3_vl_moe" else mixed)


def _one_by_one(experts: Experts, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The grouped product of a CPU, whose weights are laid out expert by expert."""
    rows = zip([0, *ends.tolist()], ends.tolist(), strict=False)
    return torch.cat([experts.run(n, x[begin:end]) for n, (begin, end) in enumerate(rows) if end > begin])


def _noted(name: str, kernel: Callable[..., Any], used: set[str]) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        used.add(name)
        return kernel(*given)

    return call
