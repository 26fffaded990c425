"""The front's side of the ranks' mirrors: answers, cancellation, and an engine that ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from common.errors import DataLoss
from llm_service.engine.messages import PullEnded
from llm_service.engine_client.mirrors import Mirrors
from llm_service.worker.messages import InvalidateRows, MirrorOrder, Pulled, PullRows, UnmapPool


@dataclass
class Bench:
    sent: list[MirrorOrder] = field(default_factory=list)
    lost: int = 0

    def __post_init__(self) -> None:
        self.mirrors = Mirrors(self.sent.append)
        self.mirrors.opened(["GPU-0"])
        self.mirrors.on_lost = self._lose

    def _lose(self) -> None:
        self.lost += 1

    async def pull(self) -> asyncio.Task[Pulled]:
        given = {"region": "pool", "handle": b"h", "source": 64, "target": 128, "size": 32, "row_sum": 9}
        task = asyncio.create_task(self.mirrors.pull(**given))
        await asyncio.sleep(0)
        return task


async def test_each_pull_gets_its_own_answer() -> None:
    bench = Bench()
    first, second = await bench.pull(), await bench.pull()
    one, two = bench.sent
    assert isinstance(one, PullRows)
    assert isinstance(two, PullRows)
    bench.mirrors.ended(PullEnded(two.id, Pulled.LANDED))
    bench.mirrors.ended(PullEnded(one.id, Pulled.UNREACHABLE))
    assert (await first, await second) == (Pulled.UNREACHABLE, Pulled.LANDED)


async def test_who_is_cancelled_stays_until_the_ranks_no_longer_write() -> None:
    bench = Bench()
    task = await bench.pull()
    for _ in range(2):
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
    assert not task.done()
    bench.mirrors.ended(PullEnded(bench.sent[0].id, Pulled.LANDED))
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_engine_that_ends_ends_its_pulls_and_is_told_of_once() -> None:
    bench = Bench()
    waiting, leaving = await bench.pull(), await bench.pull()
    leaving.cancel()
    await asyncio.sleep(0)
    bench.mirrors.lost()
    bench.mirrors.lost()
    with pytest.raises(DataLoss):
        await waiting
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert (bench.lost, list(bench.mirrors.reachable)) == (1, [])


async def test_without_mirrors_nobody_hears_of_places() -> None:
    bench = Bench()
    bench.mirrors.opened([])
    bench.mirrors.invalidate(0, 64)
    with pytest.raises(DataLoss):
        await (await bench.pull())
    assert bench.sent == []
    bench.mirrors.opened(["GPU-0"])
    bench.mirrors.invalidate(0, 64)
    bench.mirrors.unmap("pool")
    assert bench.sent == [InvalidateRows(0, 64), UnmapPool("pool")]
