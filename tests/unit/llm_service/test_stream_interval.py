"""Tokens of an answer that a caller is given together (`--stream-interval`)."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import Unavailable
from llm_service.engine.messages import Add, Complete, Started, Token
from llm_service.engine_client.engine_request import EngineRequest
from llm_service.request import SamplingParams
from tests.unit.llm_service.scripted_engine import Holder


def request_of(stream_interval: int, choices: int = 1) -> EngineRequest:
    add = Add(
        id=1,
        token_ids=b"",
        positions=b"",
        mrope_delta=0,
        items=[],
        sampling=SamplingParams(max_tokens=99, n=choices),
        salt="",
        priority=0,
        deadline=None,
    )
    request = EngineRequest(add, Holder(), 1, lambda *_: None, stream_interval)
    request.put(Started(1, 0), 0.0)
    return request


def put(request: EngineRequest, *tokens: int, choice: int = 0, ended: str = "") -> None:
    for number, token in enumerate(tokens, 1):
        request.put(Token(1, choice, token, ended if number == len(tokens) else ""), 0.0)


async def given(request: EngineRequest) -> list[int]:
    """The tokens of the next read, whatever else comes with them."""
    return [event.token for event in await request.next() if isinstance(event, Token)]


async def waits(request: EngineRequest) -> asyncio.Task[list[int]]:
    """A read that has nothing to return yet."""
    reading = asyncio.create_task(given(request))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not reading.done()
    return reading


async def test_the_first_token_is_given_at_once_and_further_ones_when_there_are_enough() -> None:
    request = request_of(3)
    assert await given(request) == []
    put(request, 7)
    assert await given(request) == [7]
    put(request, 8, 9)
    reading = await waits(request)
    put(request, 10)
    assert await reading == [8, 9, 10]


async def test_the_last_token_does_not_wait() -> None:
    request = request_of(8)
    put(request, 7)
    await given(request)
    put(request, 8)
    reading = await waits(request)
    put(request, 9, ended="stop")
    assert await reading == [8, 9]


async def test_each_choice_is_counted_by_itself() -> None:
    request = request_of(3, choices=2)
    put(request, 7)
    put(request, 17, choice=1)
    assert await given(request) == [7, 17]
    put(request, 8, 9)
    put(request, 18, 19, choice=1)
    reading = await waits(request)
    put(request, 20, choice=1)
    assert await reading == [8, 9, 18, 19, 20]
    request.put(Complete(1, 0, "length"), 0.0)
    assert await given(request) == []


async def test_tokens_do_not_wait_for_an_engine_that_has_ended_nor_for_an_error() -> None:
    request = request_of(4)
    put(request, 7)
    await given(request)
    put(request, 8)
    reading = await waits(request)
    request.lose_engine()
    assert await reading == [8]
    put(request, 9)
    reading = await waits(request)
    request.fail(Unavailable("gone"))
    assert await reading == [9]
    for _ in range(2):
        with pytest.raises(Unavailable):
            await request.next()


async def test_by_default_every_token_is_given_at_once() -> None:
    request = request_of(1)
    await given(request)
    for token in range(5):
        put(request, token)
        assert await given(request) == [token]
