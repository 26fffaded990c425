"""The decoder's small kernels for CPUs, each against torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.kernels import rows_cpu
from llm_service.layers import gate, kernels, norm
from llm_service.models import decoder
from tests import row_cases
from tests.checkpoints import Family


@pytest.mark.parametrize(("rows", "size"), [*row_cases.NORMS, (0, 64), (300, 128)])
def test_a_norm_is_torch_s(rows: int, size: int) -> None:
    row_cases.check_norm(rows_cpu, rows, size, torch.float32, "cpu")


@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("queries", "keys", "head"), row_cases.HEADS)
def test_queries_and_keys_are_normed_and_turned_as_by_torch(
    queries: int, keys: int, head: int, normed: bool, tokens: int
) -> None:
    row_cases.check_turn(rows_cpu, queries, keys, head, torch.float32, "cpu", normed=normed, tokens=tokens)


@pytest.mark.parametrize("inner", row_cases.GATES)
def test_a_gate_is_torch_s(inner: int) -> None:
    row_cases.check_gate(rows_cpu, inner, torch.float32, "cpu")


def test_they_are_for_float32_on_a_cpu() -> None:
    assert kernels.row_kernels(torch.zeros(2)) is rows_cpu
    assert kernels.row_kernels(torch.zeros(2, dtype=torch.bfloat16)) is None


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_decoders_give_the_same_tokens_without_them(
    family: Family, checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints(family)
    monkeypatch.setattr(decoder.Layer, "settle", lambda self: None)  # few rows would go another way
    with_them = row_cases.greedy_tokens(folder)
    for module in (gate, norm, decoder):
        monkeypatch.setattr(module, "row_kernels", lambda x: None)
    assert row_cases.greedy_tokens(folder) == with_them
