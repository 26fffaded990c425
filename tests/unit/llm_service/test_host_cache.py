"""KV blocks on their way to the host's memory and back: every part of them, of every layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llm_service.layers.cache_spec import CacheSpec, IndexedKV, PagedKV, SharedKV
from llm_service.settings import CacheDtype
from llm_service.worker.caches import Caches
from llm_service.worker.host_cache import HostCache

CPU = torch.device("cpu")
BLOCKS = 6
SPECS: dict[str, list[CacheSpec]] = {
    "one kind": [PagedKV(4, 2, 32), PagedKV(4, 2, 32)],
    "two kinds, one shared": [PagedKV(4, 2, 32), PagedKV(4, 1, 64), SharedKV(0)],
    "latents": [PagedKV(4, 1, 96, values_in_keys=64)],
    "an index": [IndexedKV(PagedKV(4, 2, 32), 16), PagedKV(4, 2, 32)],
    "an index, and a layer that goes by it": [IndexedKV(PagedKV(4, 2, 32), 16), IndexedKV(PagedKV(4, 2, 32), 0)],
}


def caches_of(specs: list[CacheSpec], **more: Any) -> Caches:
    index = SimpleNamespace(batch=None)
    mixers: Any = [SimpleNamespace(cache_spec=lambda spec=spec: spec, index_backend=lambda *_: index) for spec in specs]
    return Caches(mixers, BLOCKS, 4, torch.bfloat16, CPU, attention="torch", **more)


WAYS = pytest.mark.parametrize(
    "way",
    [{"gathers": False}, {"gathers": True, "at_once": 1}, {"gathers": True}],
    ids=["as on a CPU", "one by one", "all at once"],
)


@WAYS
@pytest.mark.parametrize("name", SPECS)
def test_a_block_comes_back_as_it_was_in_every_layer(name: str, way: dict[str, Any]) -> None:
    check(caches_of(SPECS[name]), way)


@WAYS
def test_so_does_one_in_8_bits(way: dict[str, Any]) -> None:
    check(caches_of(SPECS["one kind"], kv_cache_dtype=CacheDtype.INT8), way)


def check(caches: Caches, way: dict[str, Any]) -> None:
    """Blocks 1, 4 and 0 go to the host, are written over, and come back in other places of the cache."""
    tensors, noise = caches.block_tensors, torch.Generator().manual_seed(0)
    for each in tensors:
        each.copy_(torch.randint(-100, 100, each.shape, generator=noise))
    before = [each.clone() for each in tensors]
    host = HostCache(tensors, 4, **way)
    host.offload([(1, 3), (4, 0), (0, 2)])
    for each in tensors:
        each[:, [0, 1, 4]] = 0
    host.load([(3, 5), (2, 1), (0, 4)])
    for each, was in zip(tensors, before, strict=True):
        expected = was.clone()
        expected[:, 0] = 0
        expected[:, 5], expected[:, 1], expected[:, 4] = was[:, 1], was[:, 0], was[:, 4]
        assert torch.equal(each, expected)


@WAYS
def test_places_are_as_far_apart_as_those_of_the_rank_that_has_most(way: dict[str, Any]) -> None:
    """So the front finds them, which has the memory of all ranks."""
    caches = caches_of(SPECS["one kind"])
    (cache,) = caches.block_tensors
    cache.copy_(torch.arange(BLOCKS + 1)[None, :, None, None, None].expand(cache.shape))
    own = HostCache([cache], 1, **way).place_bytes
    memory = bytearray(b"." * 3 * (own + 12))
    host = HostCache([cache], 3, memory=memoryview(memory), place_bytes=own + 12, **way)
    assert host.place_bytes == own + 12
    host.offload([(5, 0), (2, 2)])
    there = [memory[place * (own + 12) :][:own] for place in (0, 2)]
    assert there == [cache[:, block].contiguous().view(torch.uint8).numpy().tobytes() for block in (5, 2)]
    assert memory.count(b".", own, 2 * (own + 12)) == own + 24
    host.load([(2, 0), (0, 1)])
    assert torch.equal(cache[:, 0], cache[:, 2])
    assert torch.equal(cache[:, 1], cache[:, 5])


@WAYS
def test_a_place_that_is_written_twice_has_what_came_last(way: dict[str, Any]) -> None:
    caches = caches_of(SPECS["one kind"])
    (cache,) = caches.block_tensors
    cache.copy_(torch.arange(BLOCKS + 1)[None, :, None, None, None].expand(cache.shape))
    host = HostCache([cache], 1, **way)
    host.offload([(2, 0), (3, 0)])
    host.load([(0, 5)])
    assert bool((cache[:, 5] == 3).all())
