"""The decoder's small kernels for CPUs, each against torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llm_service.layers import gate, kernels, norm
from llm_service.layers.cpu import row_kernels as rows_cpu
from llm_service.layers.cpu.row_kernels import FEW
from llm_service.models import decoder
from tests import row_cases
from tests.checkpoints import Family


@pytest.mark.parametrize(("rows", "size"), [*row_cases.NORMS, (0, 64), (300, 128)])
def test_a_norm_is_torch_s(rows: int, size: int) -> None:
    row_cases.check_norm(rows_cpu, rows, size, torch.float32, "cpu")


@pytest.mark.parametrize("tokens", [0, 1, 5, 33])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("queries", "keys", "head"), row_cases.HEADS)
def test_queries_and_keys_are_normed_and_turned_as_by_torch(
    queries: int, keys: int, head: int, normed: bool, tokens: int
) -> None:
    row_cases.check_qk_norm_rotary(rows_cpu, queries, keys, head, torch.float32, "cpu", normed=normed, tokens=tokens)


@pytest.mark.parametrize("inner", [*row_cases.GATES, 8])
def test_a_gate_is_torch_s(inner: int) -> None:
    row_cases.check_silu_and_mul(rows_cpu, inner, torch.float32, "cpu")


def test_a_processor_without_wide_vectors_leaves_gates_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_cpu, "wide_vectors", lambda: False)
    monkeypatch.setattr(rows_cpu, "silu_and_mul_rows", None)
    row_cases.check_silu_and_mul(rows_cpu, 24, torch.float32, "cpu")


def test_they_are_for_float32_on_a_cpu() -> None:
    assert kernels.row_kernels(torch.zeros(2)) is rows_cpu
    assert kernels.row_kernels(torch.zeros(2, dtype=torch.bfloat16)) is None


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_decoders_give_the_same_tokens_without_them(
    family: Family, checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints(family)
    monkeypatch.setattr(decoder.Layer, "finalize", lambda self: None)  # few rows would go another way
    with_them = row_cases.greedy_tokens(folder)
    for module in (gate, norm, decoder):
        monkeypatch.setattr(module, "row_kernels", lambda x: None)
    assert row_cases.greedy_tokens(folder) == with_them


def test_many_rows_on_all_threads_are_what_few_are_on_one() -> None:
    x = torch.randn(FEW + 8, 8 * 64, generator=torch.Generator().manual_seed(0))
    gain, angles = x[0, :64].clone(), x[:, None, 64:128]
    heads = x.view(len(x), 8, 64)

    def few(kernel: Callable[[slice], torch.Tensor]) -> torch.Tensor:
        return torch.cat([kernel(slice(row, row + 1)) for row in range(len(x))])

    def qk_norm_rotary(rows: slice) -> torch.Tensor:
        return rows_cpu.qk_norm_rotary(heads[rows], angles[rows], angles[rows], 4, 2, (gain, gain), 1e-6)

    every = slice(None)
    assert torch.equal(few(qk_norm_rotary), qk_norm_rotary(every))
    assert torch.equal(few(lambda rows: rows_cpu.silu_and_mul(x[rows])), rows_cpu.silu_and_mul(x))
    wide = torch.ones(8 * 64)
    assert torch.equal(few(lambda rows: rows_cpu.rms_norm(x[rows], wide, 1e-6)), rows_cpu.rms_norm(x, wide, 1e-6))
