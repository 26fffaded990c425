"""KV blocks on their way from a GPU to the host's memory and back, in the order of the GPU's work."""

from __future__ import annotations

import pytest
import torch

from common.shm.arena import SharedBuffer
from llm_service.layers.attention.backend import CacheShape
from llm_service.settings import CacheDtype
from llm_service.worker.host_cache import HostCache

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")


@pytest.mark.parametrize("kept", CacheDtype)
def test_blocks_come_back_as_they_were_though_nobody_waits(kept: CacheDtype) -> None:
    """Steps write to the cache before and after, without a look from the host between them."""
    shape = CacheShape(4, 200, 16, 16, 8, 128, kept=kept)
    cache = shape.new_cache(torch.bfloat16, CUDA)
    parts = cache.flatten(0, 1)
    cache.copy_(torch.randint(-100, 100, cache.shape, device=CUDA))
    before = cache.clone()
    host = HostCache([parts], 150, at_once=1 << 20)
    assert host._memory.is_pinned(), "the host waits for copies"
    for turn in range(3):
        host.offload([(block, block) for block in range(150)])
        cache.zero_()
        host.load([(block, block) for block in range(150)])
        cache[:, :, 150:].copy_(before[:, :, 150:])
        assert torch.equal(cache, before), turn


def test_a_place_is_read_before_another_block_is_put_there() -> None:
    cache = torch.zeros(1, 9, 1 << 20, dtype=torch.uint8, device=CUDA)
    host = HostCache([cache], 1)
    for number in range(1, 9):
        cache[:, 0].fill_(number)
        host.offload([(0, 0)])
        host.load([(0, number)])
    torch.cuda.synchronize()
    assert cache[0, 1:, -1].tolist() == list(range(1, 9))


def test_what_another_service_is_to_read_is_there_once_it_was_waited_for() -> None:
    cache = torch.randint(0, 200, (2, 40, 1 << 18), dtype=torch.uint8, device=CUDA)
    shared = SharedBuffer.create("test-blocks", 32 * 2 << 18)
    host = HostCache([cache], 32, memory=shared.view)
    assert host.place_bytes == 2 << 18
    for turn in range(3):
        cache.add_(1)
        host.offload([(block + turn, block) for block in range(32)])
        host.synchronize()
        read = torch.frombuffer(shared.view, dtype=torch.uint8).clone().view(32, 2, -1)
        assert torch.equal(read.transpose(0, 1), cache[:, turn : turn + 32].cpu()), turn
    del host, read
    shared.close()
