"""What adapters add by our kernels, compiled. `make gpu-check`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from llm_service.layers.gpu import lora_tiles
from testkit import adapter_cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", adapter_cases.TYPES, ids=str)
@pytest.mark.parametrize("slots", adapter_cases.BATCHES, ids=len)
@pytest.mark.parametrize(("rank", "inputs", "parts"), adapter_cases.SIZES)
def test_each_row_gets_what_its_adapter_adds(
    rank: int, inputs: int, parts: tuple[int, ...], slots: list[int], dtype: torch.dtype
) -> None:
    adapter_cases.check_add(rank, inputs, parts, slots, dtype, "cuda")


@pytest.mark.parametrize("dtype", adapter_cases.TYPES, ids=str)
@pytest.mark.parametrize("rank", [8, 64, 100])
def test_the_kernels_pass_their_trial(rank: int, dtype: torch.dtype) -> None:
    assert lora_tiles.computes(rank, dtype, torch.device("cuda:0"))
