"""Who is asked to compute prompts, and who is left alone: by services that never give a block."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from common.rpc.channel import ChannelSecurity
from common.shm.arena import SharedBuffer
from llm_service.engine.messages import AwaitBlocks, BlocksAnswer
from llm_service.engine_client.block_places import BlockPlaces
from llm_service.prefill.services import PrefillServices
from llm_service.request import Request, SamplingParams, TokenPrompt
from twinlens.v1 import llm_pb2
from twinlens.v1.llm_pb2_grpc import LlmServiceServicer, add_LlmServiceServicer_to_server

BLOCKS, PLACE_BYTES = 4, 8


class Silent(LlmServiceServicer):
    """Takes prompts, and says nothing."""

    def __init__(self, heard: asyncio.Queue[Silent]) -> None:
        self._heard = heard

    async def Prefill(self, request: llm_pb2.PrefillRequest, context: Any) -> AsyncIterator[llm_pb2.PrefillResponse]:
        self._heard.put_nowait(self)
        await asyncio.Event().wait()
        yield llm_pb2.PrefillResponse()


@pytest.fixture
def places() -> Iterator[BlockPlaces]:
    """Of an engine that has nothing cached, and room for every block."""
    memory = SharedBuffer.create("blocks", BLOCKS * PLACE_BYTES)

    def send(message: Any) -> None:
        answer = BlocksAnswer(id=getattr(message, "id", 0))
        if isinstance(message, AwaitBlocks):
            answer = BlocksAnswer(id=message.id, places=list(range(len(message.identities))))
        asyncio.get_running_loop().call_soon(found.take, answer)

    found = BlockPlaces(memory, 1, len(memory.view), send)
    found.opened(PLACE_BYTES)
    yield found
    memory.close()


def asked(seconds: float | None = None) -> Request:
    """A prompt of five blocks, and how long its caller waits."""
    deadline = None if seconds is None else time.monotonic() + seconds
    tokens, sampling = array("i", range(16 * BLOCKS + 1)), SamplingParams(max_tokens=1, temperature=0.0)
    return Request("", TokenPrompt(tuple(tokens)), (), sampling, deadline=deadline)


@asynccontextmanager
async def silent(
    places: BlockPlaces, seconds: float, count: int = 1
) -> AsyncIterator[tuple[PrefillServices, asyncio.Queue[Silent]]]:
    """Silent services, what asks them within so many seconds, and who of them was asked; each is known by then."""
    heard: asyncio.Queue[Silent] = asyncio.Queue()
    servers = [grpc.aio.server() for _ in range(count)]
    addresses: list[str] = []
    for server in servers:
        add_LlmServiceServicer_to_server(Silent(heard), server)
        addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
    prefills = PrefillServices(addresses, ChannelSecurity(), places, b"", block_size=16, tokens=16, seconds=seconds)
    await prefills.start()
    first = asyncio.create_task(heard.get())
    try:
        while not first.done():
            asking = asyncio.create_task(bring(prefills))
            await asyncio.wait({asking, first}, return_when=asyncio.FIRST_COMPLETED)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        yield prefills, heard
    finally:
        first.cancel()
        await prefills.stop()
        await asyncio.gather(*(each.stop(None) for each in servers))


async def bring(prefills: PrefillServices, seconds: float | None = None) -> int:
    identities = [bytes([n]) * 32 for n in range(BLOCKS)]
    return await prefills.bring(asked(seconds), [[1]], [], identities)


def test_one_that_was_given_too_little_time_by_callers_is_asked_again(places: BlockPlaces) -> None:
    async def ask() -> int:
        async with silent(places, 60.0) as (prefills, _):
            before = prefills.counters.prompts
            assert [await bring(prefills, 0.05) for _ in range(4)] == [0] * 4
            return prefills.counters.prompts - before

    assert asyncio.run(ask()) == 4


def test_one_that_takes_too_long_is_left_alone_for_a_while(places: BlockPlaces) -> None:
    async def ask() -> int:
        async with silent(places, 0.05) as (prefills, _):
            assert [await bring(prefills) for _ in range(40)] == [0] * 40
            return prefills.counters.prompts

    assert asyncio.run(ask()) < 40


def test_prompts_that_begin_alike_and_come_together_are_not_all_given_to_one(places: BlockPlaces) -> None:
    async def ask() -> list[int]:
        async with silent(places, 60.0, count=2) as (prefills, heard):
            asking = [asyncio.create_task(bring(prefills)) for _ in range(8)]
            found = Counter([await heard.get() for _ in range(8)])
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            return list(found.values())

    assert asyncio.run(ask()) == [4, 4]
