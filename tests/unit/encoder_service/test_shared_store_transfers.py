"""Large rows over a slow link to the shared store: they may take their time while they go on, and nobody else pays."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from common.media.item import Grid, Header, Modality
from encoder_service.engine.shared_store import SharedStore, SharedStoreMiss
from encoder_service.engine.shared_store_client import Breaker, SharedStoreClient
from tests.clock import Forward, turns
from tests.unit.encoder_service.shared_stores import HEADER, LAYOUT, NAME, ROWS, computed, loaded, replica

MIB = 1 << 20
PACE = 10 * MIB
"""Bytes a second over the link."""

SECONDS = 0.15
"""Longer than a chunk takes over the link, and shorter than all rows do."""

STALLED = Header(b"s" * 32, Modality.VIDEO, Grid(4, 100, 40), HEADER.tokens)


@pytest.fixture(autouse=True)
def clock(forward: Forward) -> Forward:
    """No time passes but by the link."""
    return forward


class Link:
    """Passes bytes between replicas and the server, of which each takes its time by the test's clock. `held_up` is
    asked about all that comes back before it is passed on; `stalled` counts what it held up."""

    def __init__(self, path: str, forward: Forward) -> None:
        self.held_up: Callable[[bytes], bool] = lambda _: False
        self.stalled = 0
        self.pace = PACE
        self._path = path
        self._forward = forward
        self._pumps: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """Its address, for the length of the block."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        try:
            yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            for task in self._pumps:
                task.cancel()
            await asyncio.gather(*self._pumps, return_exceptions=True)
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, there = await asyncio.open_unix_connection(self._path)
        for source, target, comes_back in ((reader, there, False), (back, writer, True)):
            self._pumps.add(asyncio.create_task(self._pump(source, target, comes_back)))

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, comes_back: bool) -> None:
        with contextlib.closing(target), contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                if comes_back and self.held_up(data):
                    self.stalled += 1
                    await asyncio.Event().wait()
                target.write(data)
                await target.drain()
                self._forward(len(data) / self.pace)


@asynccontextmanager
async def over_a_link(server, forward: Forward, **options):
    """A replica, its store, and the link between it and the server."""
    link = Link(server.path, forward)
    async with link.open() as url, replica(url, seconds=SECONDS, **options) as (made, store):
        yield link, made, store


async def all_written(made: SharedStore, count: int = 1) -> None:
    while made.counts["written"] + made.counts["dropped"] < count or made._background:
        await turns(1)


async def put_there(server, header: Header = HEADER) -> None:
    async with replica(server.url) as (other, store):
        await computed(other, store, header)
        await all_written(other)
        assert other.counts["written"] == 1


async def test_rows_that_take_longer_than_an_answer_may_are_loaded_while_they_come(server, clock):
    await put_there(server)
    async with over_a_link(server, clock) as (_, made, _):
        assert await loaded(made, HEADER) == ROWS
        assert made.counts["errors"] == 0


async def test_rows_that_take_longer_than_an_answer_may_are_written_while_they_go(server, clock):
    async with over_a_link(server, clock) as (_, made, store):
        await computed(made, store)
        await all_written(made)
        assert (made.counts["written"], made.counts["errors"]) == (1, 0)
        assert await loaded(made, HEADER) == ROWS


async def test_rows_that_stop_in_the_midst_are_a_miss_and_the_server_goes_on_being_asked(server, clock):
    await put_there(server)
    async with over_a_link(server, clock, breaker=Breaker(lambda: 0.0)) as (link, made, _):
        link.held_up = lambda data: len(data) > 1000
        for number in range(1, 6):
            loading = asyncio.create_task(loaded(made, HEADER))
            while link.stalled < number:
                await turns(1)
            await passing(clock, loading)
            with pytest.raises(SharedStoreMiss):
                await loading
            assert made.counts["errors"] == number
        assert not made.client.breaker.is_open
        assert await made.find(HEADER.key, "") == HEADER


async def test_while_many_rows_stand_still_headers_are_told(server, clock):
    await put_there(server)
    async with over_a_link(server, clock) as (link, made, _):
        link.held_up = lambda data: len(data) > 1000
        loading = [asyncio.create_task(loaded(made, HEADER)) for _ in range(20)]
        while link.stalled < 16:  # so many are on their way at once
            await turns(1)
        assert await made.find(HEADER.key, "") == HEADER
        assert await made.find(STALLED.key, "") is None
        assert made.counts["errors"] == 0
        for each in loading:
            await passing(clock, each)
        await asyncio.gather(*loading, return_exceptions=True)
        assert not made.client.breaker.is_open, "that there was no turn says nothing of the server"


async def test_a_server_that_says_nothing_to_transfers_is_left_alone(server, clock):
    await put_there(server)
    async with over_a_link(server, clock, breaker=Breaker(lambda: 0.0)) as (link, made, _):
        link.held_up = lambda _: True
        for _ in range(3):
            loading = asyncio.create_task(loaded(made, HEADER))
            await passing(clock, loading)
            with pytest.raises(SharedStoreMiss):
                await loading
        assert made.client.breaker.is_open


async def test_rows_that_go_on_too_slowly_are_given_up_in_the_end(clock):
    client = SharedStoreClient("redis://127.0.0.1:1", seconds=1.0)
    parts = 0

    async def work(_: Any, progressed: Callable[[Any], Any]) -> bool:
        nonlocal parts
        for parts in range(1000):  # noqa: B007 - it is looked at outside
            clock(0.9)
            await turns()
            progressed(None)
        return True

    assert await client.transfer(work, 64 * MIB) is None
    assert 5 <= parts <= 15, "a second, and as long as 64 MiB may take"
    assert not client.breaker.is_open
    assert await client.transfer(work, 64 << 30) is True
    await client.close()


async def test_a_write_that_is_given_up_leaves_nothing(server, clock):
    async with over_a_link(server, clock) as (link, made, store):
        passed, met = 0, asyncio.Event()

        def held_up(data: bytes) -> bool:
            nonlocal passed
            passed += b"+QUEUED" in data
            if passed == 3 and not met.is_set():
                met.set()
                return True
            return False

        link.held_up = held_up
        await computed(made, store)
        await met.wait()
        clock(SECONDS)  # and no more: what is begun has to be deleted in its own time
        await all_written(made)
        assert made.counts["dropped"] == 1
    with server.client() as client:
        assert client.keys() == []


async def test_a_write_of_rows_that_make_way_leaves_nothing_and_holds_no_room(server, clock):
    async with over_a_link(server, clock) as (link, made, store):

        def made_way(data: bytes) -> bool:
            if b"+QUEUED" in data and len(store):
                assert list(store.flush_in_parts()) == [(1, len(ROWS))], "its bytes are free at once"
            return False

        link.held_up = made_way
        await computed(made, store)
        await all_written(made)
        assert made.counts["dropped"] == 1
    with server.client() as client:
        assert client.keys() == []


async def test_a_replica_that_stops_in_the_midst_of_a_write_leaves_nothing(server, clock):
    async with over_a_link(server, clock) as (link, made, store):
        met = asyncio.Event()
        passed = 0

        def looked(data: bytes) -> bool:
            nonlocal passed
            passed += b"+QUEUED" in data
            if passed == 2:
                met.set()
            return False

        link.held_up = looked
        await computed(made, store)
        await met.wait()
        await made.stop()
    with server.client() as client:
        assert client.keys() == []


async def test_while_rows_are_written_anew_the_old_ones_are_there(server, clock):
    await put_there(server)
    async with over_a_link(server, clock) as (link, made, store), replica(server.url) as (other, _):
        found: list[int] = []

        def looked(data: bytes) -> bool:
            with server.client() as client:
                found.append(client.hlen(NAME))
            return False

        await computed(made, store, found=HEADER)
        link.held_up = looked
        await all_written(made)
        assert made.counts["written"] == 1
        assert set(found) == {1 + len(list(LAYOUT.chunks(0, HEADER.tokens)))}
        assert await loaded(other, HEADER) == ROWS


async def test_part_of_an_item_whose_writer_is_lost_stays_for_a_minute_or_so(server, clock):
    async with over_a_link(server, clock, ttl=7200) as (link, made, store):
        left: list[int] = []

        def looked(data: bytes) -> bool:
            with server.client() as client:
                left.extend(client.ttl(name) for name in client.keys("twinlens:part:*"))
            return False

        link.held_up = looked
        await computed(made, store)
        await all_written(made)
        assert left
        assert all(0 < each <= 61 for each in left)
        with server.client() as client:
            assert 7000 < client.ttl(NAME) <= 7200


async def passing(clock: Forward, task: asyncio.Task[Any]) -> None:
    """Time passes until a task is done."""
    while not task.done():
        clock(0.01)
        await turns()
