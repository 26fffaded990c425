"""The shared store on a real server: what is written comes back, whatever is wrong is a miss, and turns are taken."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from common.media.item import Grid, Header, Modality
from common.rows.wire import DType, RowLayout
from encoder_service.engine.shared_store import SharedStore, SharedStoreMiss
from tests.unit.encoder_service.shared_stores import (
    HEADER,
    LOCK,
    NAME,
    ROWS,
    TOKENS,
    computed,
    loaded,
    replica,
    stop_writing,
    written,
)
from tests.waiting import until


async def test_what_one_replica_wrote_another_reads(server):
    async with replica(server.url) as (one, store), replica(server.url) as (other, _):
        assert await other.find(HEADER.key, "") is None
        await computed(one, store)
        await written(one)
        assert await other.find(HEADER.key, "") == HEADER
        assert await loaded(other, HEADER) == ROWS
    assert (one.counts["written"], other.counts["hits"], one.counts["errors"] + other.counts["errors"]) == (1, 1, 0)
    with server.client() as client:
        assert client.keys() == [NAME.encode()], "no lock is left"
        assert 0 < client.ttl(NAME) <= 60


async def test_another_tenant_finds_nothing(server):
    async with replica(server.url) as (made, store):
        await computed(made, store, salt="mine")
        await written(made)
        assert await made.find(HEADER.key, "mine") == HEADER
        assert await made.find(HEADER.key, "theirs") is None
        assert await made.find_all([HEADER.key, b"x" * 32], "") == [None, None]
    with server.client() as client:
        assert not [value for value in client.hgetall(NAME).values() if b"mine" in value]


async def test_another_model_s_rows_are_not_read(server):
    async with replica(server.url) as (one, store), replica(server.url, layout=RowLayout(1, 64, DType.FLOAT32)) as two:
        await computed(one, store)
        await written(one)
        assert await two[0].find(HEADER.key, "") is None
    assert two[0].counts["garbage"] == 1


def _cut_header(client):
    client.hset(NAME, "h", client.hget(NAME, "h")[:-1])


def _flip_header(client):
    data = bytearray(client.hget(NAME, "h"))
    data[20] ^= 1
    client.hset(NAME, "h", bytes(data))


def _flip_row(client):
    data = bytearray(client.hget(NAME, "1"))
    data[-5] ^= 1
    client.hset(NAME, "1", bytes(data))


def _swap_chunks(client):
    first, second = client.hmget(NAME, "0", "1")
    client.hset(NAME, mapping={"0": second, "1": first})


def _other_type(client):
    client.delete(NAME)
    client.set(NAME, b"something else")


def _nonsense(client):
    client.hset(NAME, "h", b"TLR1nonsense")


async def test_rows_that_were_pushed_out_are_a_miss_and_no_garbage(server):
    """Between the question for the header and the one for the rows, or while another replica writes them anew."""
    async with replica(server.url) as (made, store):
        await computed(made, store)
        await written(made)
        with server.client() as client:
            client.hdel(NAME, "1")
        with pytest.raises(SharedStoreMiss):
            await loaded(made, HEADER)
        assert made.counts["garbage"] == 0
        list(store.flush_in_parts())
        await computed(made, store, found=HEADER)
        await written(made, 2)
        assert await loaded(made, HEADER) == ROWS


@pytest.mark.parametrize("spoil", [_cut_header, _flip_header, _flip_row, _swap_chunks, _other_type, _nonsense])
async def test_garbage_is_a_miss_and_good_rows_take_its_place(server, spoil):
    async with replica(server.url) as (made, store):
        await computed(made, store)
        await written(made)
        with server.client() as client:
            spoil(client)
        header = await made.find(HEADER.key, "")
        if header is not None:
            with pytest.raises(SharedStoreMiss):
                await loaded(made, header)
        while made._background:
            await asyncio.gather(*made._background)
        assert await made.find(HEADER.key, "") is None
        list(store.flush_in_parts())
        await computed(made, store)
        await written(made, 2)
        assert await loaded(made, HEADER) == ROWS


async def test_the_second_replica_waits_for_the_first_one_s_rows(server):
    async with replica(server.url) as (one, store), replica(server.url, wait=60) as (other, _):
        async with one.lock(HEADER.key, "") as lock:
            waiting = asyncio.create_task(_turn(other))
            await asyncio.to_thread(_until_asked_twice, server)
            assert not waiting.done()
            allocation = await store.allocate(TOKENS)
            store.buffer.slice(allocation.span)[:] = ROWS
            entry, lock.computed = store.commit(allocation, HEADER, ""), True
        store.unpin(entry.allocation)
        assert await waiting == HEADER
        assert await loaded(other, HEADER) == ROWS


async def test_a_replica_that_fails_gives_its_turn_to_the_next(server):
    async with replica(server.url, wait=60) as (one, _), replica(server.url, wait=60) as (other, _):
        with contextlib.suppress(ZeroDivisionError):
            async with one.lock(HEADER.key, ""):
                waiting = asyncio.create_task(_turn(other))
                await asyncio.to_thread(_until_asked_twice, server)
                raise ZeroDivisionError
        assert await waiting is None
        assert other.counts["waits_in_vain"] == 0


async def test_the_wait_for_another_replica_has_an_end(server):
    with server.client() as client:
        client.set(LOCK, b"a replica that is lost")
    async with replica(server.url, wait=0.2) as (made, store):
        await computed(made, store)
        await written(made)
        assert made.counts["waits_in_vain"] == 1
    with server.client() as client:
        assert client.get(LOCK) == b"a replica that is lost", "only an owner gives a lock back"


async def test_a_cancelled_wait_and_a_cancelled_turn_leave_no_lock(server):
    async with replica(server.url) as (one, _), replica(server.url) as (other, _):
        entered = asyncio.Event()

        async def hold() -> None:
            async with one.lock(HEADER.key, ""):
                entered.set()
                await asyncio.Event().wait()

        holding = asyncio.create_task(hold())
        await entered.wait()
        waiting = asyncio.create_task(_turn(other))
        await asyncio.to_thread(_until_asked_twice, server)
        for task in (waiting, holding):
            task.cancel()
        await asyncio.gather(waiting, holding, return_exceptions=True)
    with server.client() as client:
        assert client.keys() == []


async def test_a_full_server_keeps_answering(server):
    with server.client() as client:
        client.config_set("maxmemory", "1mb")
    try:
        async with replica(server.url) as (made, store):
            for _ in range(5):
                await computed(made, store)
                list(store.flush_in_parts())
            await written(made, 5)
            assert (made.counts["dropped"], made.client.breaker.is_open) == (5, False)
            assert await made.find(HEADER.key, "") is None
    finally:
        with server.client() as client:
            client.config_set("maxmemory", "0")


async def test_what_has_left_the_store_before_it_was_written_is_not(server):
    async with replica(server.url) as (made, store):
        stop_writing(made)
        await computed(made, store)
        list(store.flush_in_parts())
        made.start()
        await written(made)
        assert made.counts["dropped"] == 1
    with server.client() as client:
        assert client.keys() == []


async def test_too_many_that_wait_to_be_written_are_not(server):
    async with replica(server.url, writes=1) as (made, store):
        stop_writing(made)
        await computed(made, store)
        list(store.flush_in_parts())
        await computed(made, store, Header(b"z" * 32, Modality.IMAGE, Grid(1, 2, 2), 1))
        assert made.counts["dropped"] == 1


async def _turn(made: SharedStore) -> Header | None:
    async with made.lock(HEADER.key, "") as lock:
        return lock.found


def _until_asked_twice(server) -> None:
    """Someone who does not hold the lock has asked for it at least twice since now."""

    def asked() -> int:
        return client.info("commandstats").get("cmdstat_set", {}).get("calls", 0)

    with server.client() as client:
        before = asked()
        until(lambda: asked() >= before + 2, "another replica waits")
