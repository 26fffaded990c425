"""The decoder's small kernels in Triton's interpreter: each against torch, and whole decoders with and without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from llm_service.layers.cpu import layer
from llm_service.layers.gpu import row_kernels as rows_gpu
from tests import row_cases
from tests.checkpoints import Family

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


@each_type
@pytest.mark.parametrize("inner", row_cases.GATES)
def test_a_gate_is_torch_s(inner: int, dtype: torch.dtype) -> None:
    row_cases.check_silu_and_mul(rows_gpu, inner, dtype, "cpu")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_decoders_give_the_same_tokens_with_the_kernels(
    family: Family, checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints(family)
    monkeypatch.setattr(layer.FewRows, "of", lambda _: None)  # few rows on a CPU would go another way
    expected = row_cases.greedy_tokens(folder)
    used: set[str] = set()
    for name in ("rms_norm", "qk_norm_rotary", "silu_and_mul"):
        monkeypatch.setattr(rows_gpu, name, _noted(name, getattr(rows_gpu, name), used))
    monkeypatch.setattr(layer, "NumbaOps", lambda: rows_gpu)
    assert row_cases.greedy_tokens(folder) == expected
    assert used == {"rms_norm", "qk_norm_rotary", "silu_and_mul"}


def _noted(name: str, kernel: Callable[..., Any], used: set[str]) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        used.add(name)
        return kernel(*given)

    return call
