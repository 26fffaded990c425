"""Layers whose keys and values have different shapes, over the same blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from llm_service.layers.attention.backend import CacheShape, PagedChunk
from llm_service.layers.attention.torch_backend import TorchBackend
from llm_service.layers.cache_spec import CacheSpec, PagedKV, SharedKV
from llm_service.layers.self_attention.layer import SelfAttention
from llm_service.settings import CacheDtype
from llm_service.worker.caches import Caches

CPU = torch.device("cpu")
CHUNKS = [PagedChunk(0, 1, [4]), PagedChunk(0, 20, [3, 0]), PagedChunk(0, 7, [2])]
TOKENS = sum(chunk.count for chunk in CHUNKS)


@pytest.mark.parametrize("attention", ["torch", "auto"])
@pytest.mark.parametrize("wide", [48, 512])
def test_each_layer_attends_in_its_own_shape(attention: str, wide: int) -> None:
    specs = [PagedKV(4, 2, 32), PagedKV(6, 1, wide), PagedKV(4, 2, 32)]
    mixers: Any = [SimpleNamespace(cache_spec=lambda spec=spec: spec) for spec in specs]
    caches = Caches(mixers, 5, 16, torch.float32, CPU, attention=attention)
    assert [kind.shape.layers for kind in caches.paged.values()] == [2, 1]
    first, second, third = batches = caches.batches(CHUNKS)
    assert first is third
    assert first is not second
    noise = torch.Generator().manual_seed(0)
    for spec, cache, batch in zip(specs, caches.layers, batches, strict=True):
        shape = CacheShape(1, 5, 16, spec.heads, spec.kv_heads, spec.head_dim)
        counts = (spec.heads, spec.kv_heads, spec.kv_heads)
        given = [torch.randn(TOKENS, count, spec.head_dim, generator=noise) for count in counts]
        alone = TorchBackend(shape, CPU).batch(CHUNKS).attend(*given, shape.new_cache(torch.float32, CPU)[0])
        torch.testing.assert_close(batch.attend(*given, cache), alone, rtol=1e-5, atol=1e-5)


def test_a_layer_that_shares_is_handed_the_cache_that_it_shares() -> None:
    specs: list[CacheSpec] = [PagedKV(4, 2, 32), PagedKV(4, 1, 64), SharedKV(0), SharedKV(1)]
    mixers: Any = [SimpleNamespace(cache_spec=lambda spec=spec: spec) for spec in specs]
    caches = Caches(mixers, 5, 16, torch.float32, CPU, attention="torch")
    assert [kind.shape.layers for kind in caches.paged.values()] == [1, 1]
    assert caches.layers[2:] == caches.layers[:2]
    batches = caches.batches(CHUNKS)
    assert [id(batch) for batch in batches[2:]] == [id(batch) for batch in batches[:2]]


def test_kernels_for_layers_with_scales_and_without_are_compiled_before_anybody_waits() -> None:
    specs: list[CacheSpec] = [PagedKV(4, 2, 32), PagedKV(4, 2, 32), PagedKV(4, 1, 64), SharedKV(0)]
    scales = [torch.ones(2, 2), None, torch.ones(2, 1), None]
    mixers: Any = [
        mock.Mock(spec=SelfAttention, cache_spec=lambda spec=spec: spec, kv_scales=own)
        for spec, own in zip(specs, scales, strict=True)
    ]
    backends: list[mock.Mock] = []

    def make(_: CacheShape) -> mock.Mock:
        backends.append(mock.Mock(spec=["name", "batch", "warm_up"]))
        return backends[-1]

    caches = Caches(mixers, 5, 16, torch.float32, CPU, attention=make, kv_cache_dtype=CacheDtype.FP8)
    caches.warm_up()
    compiled = [[call.args[1] for call in backend.warm_up.call_args_list] for backend in backends]
    assert [[own is None for own in each] for each in compiled] == [[False, True], [False]]
    caches.batches(CHUNKS)
    given = [backend.batch.return_value.with_scales.call_args_list for backend in backends]
    assert [[call.args[0] for call in each] for each in given] == [[scales[0], scales[0]], [scales[2]]]
