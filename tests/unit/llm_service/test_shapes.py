"""What `tests/gpu/test_shapes_on_gpu.py` checks on a GPU, on a CPU with smaller numbers; kernels are interpreted."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import shape_cases
from llm_service.layers.attention.backend import CacheShape
from llm_service.settings import CacheDtype

CPU = torch.device("cpu")
SHAPE = CacheShape(1, 70, 16, 4, 2, 16)


def test_what_is_not_a_number_outside_of_live_slots_is_not_read() -> None:
    shape_cases.check_noise_outside(SHAPE, torch.float32, CPU, "triton")


def test_sequences_at_the_far_end_of_a_cache() -> None:
    shape_cases.check_far_blocks(SHAPE, torch.float32, CPU, "triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_keys_and_values_of_e4m3_with_scales(name: str, dtype: torch.dtype) -> None:
    shape = CacheShape(1, 64, 16, 4, 2, 16, kept=CacheDtype.FP8)
    shape_cases.check_scaled_e4m3(shape, (1, 1, 20), dtype, CPU, name)


def test_experts_without_tokens() -> None:
    shape_cases.check_idle_experts(16, 2, torch.bfloat16, CPU)


@pytest.mark.soak
def test_graphs_are_eager_steps_for_any_mix() -> None:
    shape_cases.check_graphs_on_random_steps(CPU, "triton", 6)
