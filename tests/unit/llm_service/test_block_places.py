"""Places of the host's memory that the front reads and writes: on all ranks, and only while their engine lives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from common.errors import Unavailable
from common.shm.arena import SharedBuffer
from llm_service.engine.messages import AwaitBlocks, BlocksAnswer, BlocksArrived, BlocksRead, LendBlocks
from llm_service.engine_client.block_places import BlockPlaces

RANKS, RANK_BYTES, PLACE_BYTES = 2, 40, 8


class Engine:
    """Answers with these places; None: not at all."""

    def __init__(self, places: list[int] | None) -> None:
        self.heard: list[Any] = []
        self._answer = places
        self.places: BlockPlaces | None = None

    def send(self, message: Any) -> None:
        self.heard.append(message)
        if self._answer is not None and isinstance(message, LendBlocks | AwaitBlocks):
            assert self.places is not None
            answer = BlocksAnswer(id=message.id, places=self._answer)
            asyncio.get_running_loop().call_soon(self.places.take, answer)


@pytest.fixture
def buffer() -> Iterator[SharedBuffer]:
    memory = SharedBuffer.create("blocks", RANKS * RANK_BYTES)
    yield memory
    memory.close()


def opened(buffer: SharedBuffer, answer: list[int] | None) -> tuple[BlockPlaces, Engine]:
    engine = Engine(answer)
    engine.places = places = BlockPlaces(buffer, RANKS, RANK_BYTES, engine.send)
    places.opened(PLACE_BYTES)
    return places, engine


def test_a_block_has_a_part_on_each_rank_and_is_read_as_it_was_written(buffer: SharedBuffer) -> None:
    places, _ = opened(buffer, [3, 0])
    data = bytes(range(16))

    async def exchange() -> list[bytes]:
        async with places.awaited([b"a", b"b", b"c"]) as awaited:
            assert awaited.count == 2
            for begin, end in ((0, 5), (5, 11), (11, 16)):  # one of them reaches over both ranks
                awaited.write(begin, data[begin:end])
            assert awaited.arrived == 1
        async with places.lent([b"a", b"b"]) as lent:
            return [lent.read(0, 0, 100), lent.read(0, 8, 100), lent.read(0, 10, 3)]

    assert asyncio.run(exchange()) == [data[:8], data[8:], data[10:13]]
    assert bytes(buffer.view[24:32]) == data[:8]
    assert bytes(buffer.view[40 + 24 : 40 + 32]) == data[8:]
    assert (places.received_blocks, places.lent_blocks) == (1, 2)


@pytest.mark.parametrize(
    "parts", [[(1, b"x")], [(0, bytes(17))], [(0, bytes(8)), (0, bytes(8))], [(0, bytes(16)), (0, b"x")]]
)
def test_what_does_not_come_in_order_is_refused(buffer: SharedBuffer, parts: list[tuple[int, bytes]]) -> None:
    places, _ = opened(buffer, [1])

    async def exchange() -> None:
        async with places.awaited([b"a"]) as awaited:
            for offset, data in parts:
                awaited.write(offset, data)

    with pytest.raises(ValueError, match="not what comes next"):
        asyncio.run(exchange())


def test_places_are_given_back_whatever_happens(buffer: SharedBuffer) -> None:
    places, engine = opened(buffer, [1, 2])

    async def take() -> None:
        async with places.awaited([b"a", b"b"]) as awaited:
            awaited.write(0, bytes(16))
            raise KeyError

    async def give() -> None:
        async with places.lent([b"a"]):
            raise KeyError

    for exchange in (take, give):
        with pytest.raises(KeyError):
            asyncio.run(exchange())
    (asked, arrived, lent, read) = engine.heard
    assert arrived == BlocksArrived(asked.id, 1)
    assert read == BlocksRead(lent.id)


def test_who_leaves_before_the_answer_gives_back_what_is_on_its_way(buffer: SharedBuffer) -> None:
    places, engine = opened(buffer, None)

    async def exchange() -> None:
        async def ask() -> None:
            async with places.awaited([b"a"]):
                raise AssertionError("there was no answer")

        asking = asyncio.create_task(ask())
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        places.take(BlocksAnswer(id=engine.heard[0].id, places=[1]))

    asyncio.run(exchange())
    assert engine.heard[1:] == [BlocksArrived(engine.heard[0].id, 0)]


def test_nothing_is_written_or_read_where_the_engine_has_ended(buffer: SharedBuffer) -> None:
    places, engine = opened(buffer, [1])

    async def exchange() -> None:
        async with places.awaited([b"a"]) as awaited, places.lent([b"a"]) as lent:
            places.lost()
            assert places.block_bytes == 0
            places.opened(PLACE_BYTES)
            for act in (lambda: awaited.write(0, b"x"), lambda: lent.read(0, 0, 1)):
                with pytest.raises(Unavailable):
                    act()

    asyncio.run(exchange())
    assert len(engine.heard) == 2, "the next engine knows nothing of that"
    assert bytes(buffer.view) == bytes(len(buffer.view))


def test_who_waits_hears_that_the_engine_has_ended(buffer: SharedBuffer) -> None:
    places, _ = opened(buffer, None)

    async def exchange() -> None:
        async def ask() -> None:
            async with places.lent([b"a"]):
                raise AssertionError("there was no answer")

        asking = asyncio.create_task(ask())
        await asyncio.sleep(0)
        places.lost()
        with pytest.raises(Unavailable):
            await asking

    asyncio.run(exchange())
