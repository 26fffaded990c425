"""Shapes that small models do not have, on a GPU. `make gpu-check`."""

from __future__ import annotations

import pytest
import torch

from benchmarks import shape_cases
from common.hardware import E4M3_CAPABILITY
from llm_service.layers.attention.backend import CacheShape
from llm_service.layers.attention.choose import choose
from llm_service.layers.gpu import index_kernels
from llm_service.layers.sparse_attention import block_decodes, token_decodes
from llm_service.layers.sparse_attention.index import IndexKeys
from llm_service.settings import CacheDtype
from testkit.attention_cases import WAYS, Case, latents_of

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")


@pytest.mark.parametrize("counts", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("size", [16, 64, 256])
def test_32_heads_over_8_in_blocks_of_any_size(size: int, counts: tuple[int, ...]) -> None:
    shape = CacheShape(1, 16 * 256 // size, size, 32, 8, 128)
    Case.random(shape, counts, torch.bfloat16, 1, CUDA).check(choose("triton", shape, torch.bfloat16, CUDA))


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < E4M3_CAPABILITY, reason="it has no e4m3"
)
@pytest.mark.parametrize("counts", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_keys_and_values_of_e4m3_with_scales(name: str, counts: tuple[int, ...]) -> None:
    shape = CacheShape(1, 256, 16, 32, 8, 128, kept=CacheDtype.FP8)
    shape_cases.check_scaled_e4m3(shape, counts, torch.bfloat16, CUDA, name)


@pytest.mark.parametrize("counts", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_latents_as_deepseek_v3_has_them(name: str, counts: tuple[int, ...]) -> None:
    shape = latents_of(576, 512, heads=64)
    Case.random(shape, counts, torch.bfloat16, 1, CUDA).check(choose(name, shape, torch.bfloat16, CUDA))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("pool", [1, 4])
def test_index_scores_of_64_heads_pass_their_trial(pool: int, dtype: torch.dtype) -> None:
    keys = IndexKeys(64, 128, 128 if pool == 1 else 256, 16, dtype, CUDA, pool)
    assert token_decodes.score_by(keys) is index_kernels.score_tokens
    blocks = IndexKeys(2, 128, 128, 16, dtype, CUDA, 32 * pool, weighs=False)
    assert block_decodes.score_by(blocks) is index_kernels.score_blocks


def test_what_is_not_a_number_outside_of_live_slots_is_not_read() -> None:
    shape_cases.check_noise_outside(CacheShape(1, 100, 16, 32, 8, 128), torch.bfloat16, CUDA, "triton")


def test_a_cache_of_more_than_two_to_the_31_elements() -> None:
    shape = CacheShape(1, 70_000, 16, 32, 8, 128)
    assert shape.blocks * shape.block_bytes(torch.int8) > 1 << 31
    shape_cases.check_far_blocks(shape, torch.bfloat16, CUDA, "triton")


def test_128_experts_most_of_which_have_no_token() -> None:
    shape_cases.check_idle_experts(128, 8, torch.bfloat16, CUDA)


def test_graphs_are_eager_steps_for_any_mix() -> None:
    shape_cases.check_graphs_on_random_steps(CUDA, "triton", 200)
