"""The decoder's small kernels for CPUs, each against torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.checkpoints.checkpoint import Checkpoint
from llm_service.layers.cpu import layer
from llm_service.layers.cpu import row_kernels as rows_cpu
from llm_service.layers.cpu.row_kernels import FEW, NumbaOps
from llm_service.layers.cpu.selection import computes_bfloat16, fused_vectors
from llm_service.layers.ops import TorchOps
from llm_service.models.loader import load_decoder
from testkit.checkpoints import Family
from tests import row_cases

NUMBA = NumbaOps()


@pytest.mark.parametrize(("rows", "size"), [*row_cases.NORMS, (0, 64), (300, 128)])
def test_a_norm_is_torch_s(rows: int, size: int) -> None:
    row_cases.check_norm(NUMBA, rows, size, torch.float32, "cpu")


@pytest.mark.parametrize("rows", [1, FEW, FEW + 1, 300])
def test_a_sum_s_norm_is_the_same_to_the_bit_as_of_what_is_added_before(rows: int) -> None:
    x, more, gain = torch.randn(rows, 96), torch.randn(rows, 96), torch.randn(96)
    total, normed = NUMBA.add_rms_norm(x, more, gain, 1e-6)
    assert total.equal(x + more)
    assert normed.equal(NUMBA.rms_norm(x + more, gain, 1e-6))


@pytest.mark.skipif(not fused_vectors(), reason="this processor lacks AVX2")
@pytest.mark.parametrize("gate", [-300.0, -1e14, -1e20, 300.0, 1e14, 1e20])
def test_gates_far_from_zero_are_shut_or_open(gate: float) -> None:
    """Of such a number's cube float32 has no number."""
    x = torch.cat([torch.full((2, 32), gate), torch.ones(2, 32)], dim=1)
    expected = torch.full((2, 32), max(0.0, gate))
    for rows in (rows_cpu.silu_and_mul_rows, rows_cpu.gelu_and_mul_rows):
        torch.testing.assert_close(torch.from_numpy(rows(x.numpy())), expected)


@pytest.mark.parametrize("tokens", [0, 1, 5, 33])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("queries", "keys", "head", "rotary"), row_cases.HEADS)
def test_queries_and_keys_are_normed_and_turned_as_by_torch(
    queries: int, keys: int, head: int, rotary: int, normed: bool, tokens: int
) -> None:
    row_cases.check_qk_norm_rotary(
        NUMBA, queries, keys, head, rotary, torch.float32, "cpu", normed=normed, tokens=tokens
    )


def test_it_does_not_matter_how_tables_lie() -> None:
    heads, tables = torch.randn(5, 3, 16), torch.randn(2, 16, 5).transpose(1, 2).unsqueeze(2).unbind()
    assert not tables[0].is_contiguous()
    expected = NUMBA.qk_norm_rotary(heads, tuple(each.contiguous() for each in tables), 2, 1, None, 1e-6)
    assert NUMBA.qk_norm_rotary(heads, tuple(tables), 2, 1, None, 1e-6).equal(expected)


@pytest.mark.parametrize("rows", [3, FEW + 1])
def test_rows_and_heads_that_lie_apart_need_no_further_kernel(rows: int) -> None:
    """One that nobody compiled before would be in the midst of a step."""
    before = [set(typed.kernel.overloads) for typed in rows_cpu.TYPED.values()]
    wide, heads, tables = torch.randn(rows, 200), torch.randn(rows, 8, 64)[:, ::2], torch.randn(2, rows, 1, 32)
    x, gain, turns = wide[:, 50:146], torch.randn(96), tuple(tables.unbind())
    assert NUMBA.rms_norm(x, gain, 1e-6).equal(NUMBA.rms_norm(x.contiguous(), gain, 1e-6))
    turned = NUMBA.qk_norm_rotary(heads.contiguous(), turns, 2, 1, None, 1e-6)
    assert NUMBA.qk_norm_rotary(heads, turns, 2, 1, None, 1e-6).equal(turned)
    for typed, kinds in zip(rows_cpu.TYPED.values(), before, strict=True):
        assert set(typed.kernel.overloads) <= {typed.types} | kinds


@pytest.mark.parametrize("size", [1.0, 30.0])
@pytest.mark.parametrize("inner", [*row_cases.GATES, 8])
def test_a_gate_is_torch_s(inner: int, size: float) -> None:
    row_cases.check_gates(NUMBA, inner, torch.float32, "cpu", size)


def test_a_processor_without_fused_vectors_leaves_gates_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_cpu, "fused_vectors", lambda: False)
    monkeypatch.setattr(rows_cpu, "silu_and_mul_rows", None)
    monkeypatch.setattr(rows_cpu, "gelu_and_mul_rows", None)
    row_cases.check_gates(NUMBA, 24, torch.float32, "cpu")


def test_they_are_for_what_is_kept_in_float32_on_a_cpu(checkpoints: Callable[..., Path]) -> None:
    """Products of bfloat16 by our kernels are summed in float32, and what is between them is of it."""
    folder = checkpoints("qwen3_vl")
    short = NumbaOps if computes_bfloat16() else TorchOps
    for dtype, expected in ((torch.float32, NumbaOps), (torch.bfloat16, short), (torch.float16, TorchOps)):
        decoder = load_decoder(Checkpoint(folder), dtype, torch.device("cpu"))
        assert {type(part.ops) for part in decoder.modules() if hasattr(part, "ops")} == {expected}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_decoders_give_the_same_tokens_without_them(
    family: Family, checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints(family)
    monkeypatch.setattr(layer.FewRows, "of", lambda _: None)  # few rows would go another way
    with_them = row_cases.greedy_tokens(folder)
    monkeypatch.setattr(layer, "NumbaOps", lambda _: TorchOps())
    assert row_cases.greedy_tokens(folder) == with_them


def test_many_rows_on_all_threads_are_what_few_are_on_one() -> None:
    x = torch.randn(FEW + 8, 8 * 64, generator=torch.Generator().manual_seed(0))
    gain, angles = x[0, :64].clone(), x[:, None, 64:128]
    heads = x.view(len(x), 8, 64)

    def few(kernel: Callable[[slice], torch.Tensor]) -> torch.Tensor:
        return torch.cat([kernel(slice(row, row + 1)) for row in range(len(x))])

    def qk_norm_rotary(rows: slice) -> torch.Tensor:
        return NUMBA.qk_norm_rotary(heads[rows], (angles[rows], angles[rows]), 4, 2, (gain, gain), 1e-6)

    every = slice(None)
    assert torch.equal(few(qk_norm_rotary), qk_norm_rotary(every))
    assert torch.equal(few(lambda rows: NUMBA.silu_and_mul(x[rows])), NUMBA.silu_and_mul(x))
    wide = torch.ones(8 * 64)
    assert torch.equal(few(lambda rows: NUMBA.rms_norm(x[rows], wide, 1e-6)), NUMBA.rms_norm(x, wide, 1e-6))
