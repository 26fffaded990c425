"""The staging arena: whole leases, in turn, and nothing left behind."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from common.errors import InvalidInput
from common.shm.arena import Range, SharedBuffer
from encoder_service.engine.staging import Staging
from tests.unit.encoder_service.fakes import turns


@pytest.fixture
def staging():
    buffer = SharedBuffer.create("test", 1024)
    yield Staging(buffer)
    buffer.close()


async def test_ranges_come_back_when_the_block_ends(staging):
    async with staging.lease(100, 200) as lease:
        first, second = lease.ranges
        assert (first.size, second.size) == (100, 200)
        assert staging.used == 128 + 256
        lease.free(first)
        assert staging.used == 256
    staging.check_idle()


async def test_a_lease_waits_until_all_of_it_can_be_had(staging):
    order: list[str] = []

    async def take(name: str, *sizes: int) -> None:
        async with staging.lease(*sizes):
            order.append(name)
            await asyncio.sleep(0)

    async with staging.lease(600):
        tasks = [asyncio.create_task(take("large", 500, 100)), asyncio.create_task(take("small", 64))]
        for _ in range(3):
            await asyncio.sleep(0)
        assert order == [], "the small one came later, and waits its turn"
    await asyncio.gather(*tasks)
    assert order[0] == "large"
    staging.check_idle()


async def test_what_never_fits_is_refused_without_a_hint(staging):
    with pytest.raises(InvalidInput) as refused:
        async with staging.lease(2000):
            pass
    assert (refused.value.reason, refused.value.retry_after) == ("STAGING_TOO_SMALL", None)


async def test_large_ranges_are_emptied_by_a_thread_before_others_get_them(staging, monkeypatch):
    staging = Staging(staging.buffer, large=512)
    go_on, emptied = threading.Event(), []

    def slowly(span: Range) -> None:
        assert go_on.wait(180)
        emptied.append((span, threading.current_thread() is threading.main_thread()))

    monkeypatch.setattr(staging.buffer, "discard", slowly)
    async with staging.lease(512, 64):
        pass
    assert staging.used == 512
    waiting = asyncio.create_task(anext(whole := _whole(staging)))
    await turns()
    assert not waiting.done()
    go_on.set()
    await waiting
    assert emptied == [(Range(0, 512), False)]
    await whole.aclose()
    await staging.drain()
    assert emptied[1:] == [(Range(0, 900), False)]
    staging.check_idle()


async def _whole(staging: Staging):
    async with staging.lease(900):
        yield


@pytest.mark.parametrize("seed", range(20))
async def test_cancelling_at_any_moment_leaves_nothing(staging, seed):
    chance = random.Random(seed)

    async def work() -> None:
        async with staging.lease(*(chance.randint(1, 300) for _ in range(chance.randint(1, 3)))) as lease:
            await asyncio.sleep(0)
            if chance.random() < 0.5:
                lease.free(lease.ranges[0])
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(work()) for _ in range(30)]
    for task in chance.sample(tasks, 15):
        for _ in range(chance.randint(0, 3)):
            await asyncio.sleep(0)
        task.cancel()
        staging.check_integrity()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(each is None or isinstance(each, asyncio.CancelledError) for each in done)
    staging.check_idle()
