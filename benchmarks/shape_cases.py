"""Shapes that small models do not have, on any device: of paged attention, mixtures of experts, and batches."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch

from benchmarks.device import Again, Machine, Peaks
from benchmarks.llm_device import Settings, config_of, make_runner, step
from common.gpu.graphs import Capture, CudaCapture
from llm_service.layers.attention.backend import CacheShape, PagedChunk
from llm_service.layers.attention.choose import choose
from llm_service.layers.attention.metadata import AttentionMetadata
from llm_service.layers.moe.sparse_mlp import SparseMLP
from llm_service.layers.tensor_parallel import ALONE
from llm_service.settings import CacheDtype
from llm_service.worker.graphs import CaptureBounds
from testkit.attention_cases import TOLERANCE, Case, of_e4m3
from testkit.plain_attention import paged_attention


def check_noise_outside(shape: CacheShape, dtype: torch.dtype, device: torch.device, attention: str) -> None:
    """What no sequence has in the cache is not a number, and reaches no result."""
    case = Case.random(shape, (1, 1, 20, 5), dtype, 3, device)
    live = torch.zeros(case.cache.shape[2] * shape.block_size, dtype=torch.bool, device=device)
    for chunk in case.chunks:
        for place in range(chunk.context + chunk.count):
            live[chunk.blocks[place // shape.block_size] * shape.block_size + place % shape.block_size] = True
    case.cache[0].flatten(1, 2)[:, ~live] = torch.nan
    batch = choose(attention, shape, dtype, device).batch(case.chunks)
    given = batch.attend(*case.heads, case.cache[0])
    assert given.isfinite().all()


def check_far_blocks(shape: CacheShape, dtype: torch.dtype, device: torch.device, attention: str) -> None:
    """Sequences at the far end of a cache give what they give in a small one."""
    size, far = shape.block_size, list(range(shape.blocks - 6, shape.blocks))
    chunks = [PagedChunk(3 * size + 2, 1, far[:4]), PagedChunk(size, 7, far[4:])]
    qkv = torch.randn(8, shape.heads + 2 * shape.kv_heads, shape.head_dim, device=device).to(dtype)
    query, key, value = qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    cache, few = (each.new_cache(dtype, device)[0] for each in (shape, replace(shape, blocks=6)))
    few.normal_()
    cache[:, far] = few[:, :6]
    given = choose(attention, shape, dtype, device).batch(chunks).attend(query, key, value, cache)
    moved = [PagedChunk(chunk.context, chunk.count, [block - far[0] for block in chunk.blocks]) for chunk in chunks]
    expected = paged_attention(query, key, value, few, AttentionMetadata.of(moved, size, device))
    torch.testing.assert_close(given, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(cache[:, far], few[:, :6], rtol=0, atol=0)


def check_scaled_e4m3(
    shape: CacheShape, counts: tuple[int, ...], dtype: torch.dtype, device: torch.device, attention: str
) -> None:
    """Keys and values of e4m3, with a scale for each head, are what they stand for."""
    case = Case.random(replace(shape, kept=CacheDtype.AUTO), counts, dtype, 4, device)
    scales = torch.rand(2, shape.kv_heads, device=device) * 0.02 + 0.005
    small, plain, expected = of_e4m3(case, shape, scales)
    batch: Any = choose(attention, shape, dtype, device).batch(case.chunks)
    given = batch.with_scales(scales).attend(*case.heads, small)
    torch.testing.assert_close(given, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(small.float() * scales.view(2, 1, 1, -1, 1), plain, rtol=0, atol=0)


def check_idle_experts(experts: int, per_token: int, dtype: torch.dtype, device: torch.device) -> None:
    """Most experts get no token, and the first and the last are among them; `_together` is `_in_turn`."""
    layer = SparseMLP(experts, per_token, 64, 32, ALONE, dtype).requires_grad_(requires_grad=False).to(device)
    for parameter in layer.parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5)
    x = torch.randn(6, 64, device=device).to(dtype)
    few = torch.randperm(experts - 2, device=device)[: per_token + 1] + 1
    chosen = torch.stack([few[torch.randperm(len(few), device=device)[:per_token]] for _ in range(6)])
    weights = torch.rand(6, per_token, device=device).to(dtype)
    together, turn = layer._together(x, weights, chosen), layer._in_turn(x, weights, chosen)
    torch.testing.assert_close(together, turn, rtol=3e-2, atol=3e-2)


@torch.inference_mode()
def check_graphs_on_random_steps(device: torch.device, attention: str, rounds: int) -> None:
    """Steps of any mix, one after the other over one cache: a replay's logits are an eager step's."""
    capture: Capture = CudaCapture(device) if device.type == "cuda" else Again()
    here = Machine(device, torch.float32, Peaks(1e9, 1e9), Peaks(1e9, 1e9), runs=1)
    runner = make_runner(config_of(2, experts=False, tiny=True), 64, here, Settings(attention))
    runner.capture(
        CaptureBounds(6, 32, 120, 4, drafts=3, draft_rows=16), capture, max_bytes=1 << 30, agree=lambda number: number
    )
    captured, numbers = runner.graphs, random.Random(0)
    assert captured is not None
    for _ in range(rounds):
        chunks = [
            (numbers.randrange(1, 80), numbers.choice([1, 1, 1, 2, 4, 7])) for _ in range(numbers.randrange(1, 5))
        ]
        plan = step(chunks)
        runner.graphs = None
        eager = runner._forward(plan).wanted
        runner.graphs = captured
        replayed = runner._forward(plan).wanted
        torch.testing.assert_close(replayed, eager, rtol=1e-3, atol=1e-3)
    assert captured.replays == rounds
