"""The decoder's small kernels, compiled, against torch's operators. `make gpu-check`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from llm_service.layers.gpu import row_ops as rows_gpu
from tests import kernel_layout, row_cases

pytestmark = pytest.mark.gpu

each_type = pytest.mark.parametrize("dtype", row_cases.TYPES, ids=str)


@each_type
@pytest.mark.parametrize(("rows", "size"), row_cases.NORMS)
def test_a_norm_is_torch_s(rows: int, size: int, dtype: torch.dtype) -> None:
    row_cases.check_norm(rows_gpu, rows, size, dtype, "cuda")


@each_type
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("queries", "keys", "head", "rotary"), row_cases.HEADS)
def test_queries_and_keys_are_normed_and_turned_as_by_torch(
    queries: int, keys: int, head: int, rotary: int, normed: bool, dtype: torch.dtype
) -> None:
    row_cases.check_qk_norm_rotary(rows_gpu, queries, keys, head, rotary, dtype, "cuda", normed=normed)


@pytest.mark.parametrize("layout", kernel_layout.LAYOUTS)
@pytest.mark.parametrize("call", row_cases.CALLS)
def test_tensors_need_not_lie_in_order(call: str, layout: str) -> None:
    row_cases.check_layouts(rows_gpu, call, layout, "cuda")


@each_type
@pytest.mark.parametrize("inner", row_cases.GATES)
def test_a_gate_is_torch_s(inner: int, dtype: torch.dtype) -> None:
    row_cases.check_gates(rows_gpu, inner, dtype, "cuda")


@each_type
@pytest.mark.parametrize(("rows", "experts", "per_token"), row_cases.ROUTES)
def test_rows_go_to_the_experts_that_torch_sends_them_to(
    rows: int, experts: int, per_token: int, dtype: torch.dtype
) -> None:
    row_cases.check_routes(rows_gpu, rows, experts, per_token, dtype, "cuda")


def test_a_row_that_is_not_finite_breaks_no_other() -> None:
    row_cases.check_routes_of_broken_rows(rows_gpu, "cuda")
