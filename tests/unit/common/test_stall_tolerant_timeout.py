"""A limit on what others send, by a clock that the test puts forward."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from common.aio.tasks import StallTolerantTimeout, StallTolerantTimer
from tests.clock import Forward, turns


async def receive(news: asyncio.Future[str], seconds: float = 100.0) -> str:
    async with StallTolerantTimeout(seconds):
        return await news


async def test_what_comes_in_time_is_received(forward: Forward) -> None:
    news: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    receiving = asyncio.create_task(receive(news))
    await turns()
    forward(99)
    await turns()
    news.set_result("news")
    assert await receiving == "news"
    forward(100)
    await turns()


async def test_when_nothing_comes_the_time_is_over(forward: Forward) -> None:
    receiving = asyncio.create_task(receive(asyncio.get_running_loop().create_future()))
    await turns()
    for _ in range(1030):
        forward(0.1)
        await turns(1)
    with pytest.raises(TimeoutError):
        await receiving


async def test_a_loop_that_stood_still_gets_a_moment_to_read_what_came_meanwhile(forward: Forward) -> None:
    loop = asyncio.get_running_loop()
    news: asyncio.Future[str] = loop.create_future()
    receiving = asyncio.create_task(receive(news))
    await turns()
    forward(500)
    await turns(9)  # the limit goes off
    assert not receiving.done()
    news.set_result("news")
    assert await receiving == "news"


async def test_that_moment_ends_as_well(forward: Forward) -> None:
    receiving = asyncio.create_task(receive(asyncio.get_running_loop().create_future()))
    await turns()
    forward(500)
    await turns(9)
    forward(5)
    with pytest.raises(TimeoutError):
        await receiving


async def test_who_is_cancelled_is_not_told_of_a_limit(forward: Forward) -> None:
    receiving = asyncio.create_task(receive(asyncio.get_running_loop().create_future()))
    await turns()
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    forward(500)
    await turns(9)


async def test_a_timer_that_is_late_waits_a_moment_in_which_it_can_be_cancelled(forward: Forward) -> None:
    called: list[str] = []
    timers = {name: StallTolerantTimer(100, partial(called.append, name)) for name in ("one", "other")}
    forward(500)
    await turns(9)
    assert called == []
    timers["one"].cancel()
    forward(5)
    await turns()
    assert called == ["other"]


async def test_a_timer_that_is_in_time_calls_at_once(forward: Forward) -> None:
    called: list[str] = []
    StallTolerantTimer(100, lambda: called.append("now"))
    forward(100)
    await turns()
    assert called == ["now"]
