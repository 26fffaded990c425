"""The shared tier on a real server: what is written comes back, whatever is wrong is a miss, and turns are taken."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from contextlib import asynccontextmanager

import numpy as np
import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from common.arena import SharedBuffer
from common.wire import DType, RowLayout
from encoder_service.engine import shared_tier, tier_format
from encoder_service.engine.shared_tier import SharedTier, TierMiss
from encoder_service.engine.store import Store
from encoder_service.engine.tier_client import Breaker, TierClient
from encoder_service.engine.tier_format import Garbage
from encoder_service.item import Grid, Header, Modality
from tests import valkey_server
from tests.waiting import until

LAYOUT = RowLayout(3, 64, DType.FLOAT32)
TOKENS = 4000
HEADER = Header(b"k" * 32, Modality.VIDEO, Grid(4, 100, 40), TOKENS, (0.25, 1.5, 2.0, 3.75), 1.25)
ROWS = np.random.default_rng(3).bytes(TOKENS * LAYOUT.row_bytes)
NAME = f"twinlens:rows:{HEADER.key.hex()}"
LOCK = f"twinlens:lock:{HEADER.key.hex()}"


@asynccontextmanager
async def replica(url: str, *, seconds: float = 5.0, wait: float = 5.0, ttl: float = 60.0, layout=LAYOUT, breaker=None):
    """A replica's tier and its store, with room for two items; neither holds anything at the end."""
    arena = SharedBuffer.create("test", 2 * len(ROWS) + 1024)
    store = Store(arena, layout.row_bytes)
    made = SharedTier(TierClient(url, seconds=seconds, breaker=breaker), store, layout, ttl=ttl, wait=wait)
    made.start()
    try:
        yield made, store
    finally:
        await made.stop()
        made.check_integrity()
        store.flush()
        store.check_integrity(idle=True)
        assert store.used == 0
        arena.close()


async def computed(made: SharedTier, store: Store, header: Header = HEADER, salt: str = "") -> None:
    """Takes a turn, and puts the rows into the store as a worker would."""
    async with made.turn(header.key, salt) as turn:
        assert turn.found is None
        place = await store.reserve(header.tokens)
        store.buffer.slice(place.span)[:] = ROWS[: place.span.size]
        turn.entry = store.commit(place, header, salt)
    store.unpin(turn.entry.place)


async def written(made: SharedTier, count: int = 1) -> None:
    counts = made.counts
    await asyncio.to_thread(until, lambda: counts["written"] + counts["dropped"] >= count, "all is written")
    while made._unlocking:
        await asyncio.gather(*made._unlocking)


async def loaded(made: SharedTier, header: Header) -> bytes:
    target = bytearray(header.tokens * LAYOUT.row_bytes)
    await made.load(header, memoryview(target))
    return bytes(target)


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


def _lose_chunk(client):
    client.hdel(NAME, "1")


def _other_type(client):
    client.delete(NAME)
    client.set(NAME, b"something else")


def _nonsense(client):
    client.hset(NAME, "h", b"TLR1nonsense")


@pytest.mark.parametrize(
    "spoil", [_cut_header, _flip_header, _flip_row, _swap_chunks, _lose_chunk, _other_type, _nonsense]
)
async def test_garbage_is_a_miss_and_good_rows_take_its_place(server, spoil):
    async with replica(server.url) as (made, store):
        await computed(made, store)
        await written(made)
        with server.client() as client:
            spoil(client)
        header = await made.find(HEADER.key, "")
        if header is not None:
            with pytest.raises(TierMiss):
                await loaded(made, header)
        while made._unlocking:
            await asyncio.gather(*made._unlocking)
        assert await made.find(HEADER.key, "") is None
        store.flush()
        await computed(made, store)
        await written(made, 2)
        assert await loaded(made, HEADER) == ROWS


async def test_the_second_replica_waits_for_the_first_one_s_rows(server):
    async with replica(server.url) as (one, store), replica(server.url, wait=60) as (other, _):
        async with one.turn(HEADER.key, "") as turn:
            waiting = asyncio.create_task(_turn(other))
            await asyncio.to_thread(_until_asked_twice, server)
            assert not waiting.done()
            place = await store.reserve(TOKENS)
            store.buffer.slice(place.span)[:] = ROWS
            turn.entry = store.commit(place, HEADER, "")
        store.unpin(turn.entry.place)
        assert await waiting == HEADER
        assert await loaded(other, HEADER) == ROWS


async def test_a_replica_that_fails_gives_its_turn_to_the_next(server):
    async with replica(server.url, wait=60) as (one, _), replica(server.url, wait=60) as (other, _):
        with contextlib.suppress(ZeroDivisionError):
            async with one.turn(HEADER.key, ""):
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
            async with one.turn(HEADER.key, ""):
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


async def test_a_server_that_is_down_costs_nothing_after_a_while(server):
    """By a clock that stands still: it is not tried again."""
    async with replica("redis://127.0.0.1:1", breaker=Breaker(Clock())) as (made, store):
        for _ in range(20):
            assert await made.find(HEADER.key, "") is None
        assert made.counts["errors"] == 3, "it is left alone"
        await computed(made, store)
        await written(made)
        assert made.counts["dropped"] == 1


@pytest.mark.parametrize(
    "reply", [b"$x\r\n", b"*x\r\n", b":x\r\n", b"*1\r\n:1\r\n", b":1\r\n", b"HTTP/1.1 400\r\n\r\n"]
)
async def test_a_server_that_speaks_nonsense_is_a_miss_and_ends_nothing(reply):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            writer.write(8 * reply)
        writer.close()

    nonsense = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with nonsense:
        port = nonsense.sockets[0].getsockname()[1]
        async with replica(f"redis://127.0.0.1:{port}", seconds=1.0, wait=0.1) as (made, store):
            assert await made.find(HEADER.key, "") is None
            with pytest.raises(TierMiss):
                await loaded(made, HEADER)
            await computed(made, store)
            await written(made)
            assert made._writer is not None
            assert not made._writer.done()
            assert (made.counts["hits"], made.counts["written"]) == (0, 0)


class Clock:
    """A breaker's time, which passes when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def heard(self, made: SharedTier, header: Header = HEADER) -> Header:
        """What the server says when it is heard in time: on a busy machine it may have to be asked again."""
        while (found := await made.find(header.key, "")) is None:
            self.now += 60
        return found


async def test_a_frozen_server_is_a_miss_within_the_bound_and_is_found_again(server):
    clock = Clock()
    with valkey_server.proxy(server) as slow:
        async with (
            replica(slow.url, seconds=0.1, breaker=Breaker(clock)) as (made, _),
            replica(server.url) as (other, store),
        ):
            await computed(other, store)
            await written(other)
            assert await clock.heard(made) == HEADER
            before = made.counts["errors"]
            slow.flowing.clear()
            for _ in range(10):
                assert await made.find(HEADER.key, "") is None
            assert made.counts["errors"] == before + 3, "then it is left alone"
            slow.flowing.set()
            assert await made.find(HEADER.key, "") is None, "it is left alone until it may be tried again"
            assert made.counts["errors"] == before + 3
            assert await clock.heard(made) == HEADER


async def test_a_late_answer_is_never_taken_for_another_question_s(server):
    """Answers come after the bound: what they are to is forgotten by then, and their connection with it."""
    clock, second = Clock(), Header(b"z" * 32, Modality.IMAGE, Grid(1, 100, 40), 1000)
    with valkey_server.proxy(server) as slow:
        async with replica(server.url) as (other, store):
            await computed(other, store)
            await computed(other, store, second)
            await written(other, 2)
            async with replica(slow.url, seconds=0.15, breaker=Breaker(clock)) as (made, _):
                assert await clock.heard(made) == HEADER
                slow.delay = 0.25
                assert await made.find(HEADER.key, "") is None
                slow.delay = 0.0
                for _ in range(5):
                    assert await clock.heard(made, second) == second
                    assert await clock.heard(made) == HEADER


async def test_a_full_server_keeps_answering(server):
    with server.client() as client:
        client.config_set("maxmemory", "1mb")
    try:
        async with replica(server.url) as (made, store):
            for _ in range(5):
                await computed(made, store)
                store.flush()
            await written(made, 5)
            assert (made.counts["dropped"], made.client.breaker.is_open) == (5, False)
            assert await made.find(HEADER.key, "") is None
    finally:
        with server.client() as client:
            client.config_set("maxmemory", "0")


async def test_what_has_left_the_store_before_it_was_written_is_not(server):
    async with replica(server.url) as (made, store):
        made._writer.cancel()
        await computed(made, store)
        store.flush()
        made.start()
        await written(made)
        assert made.counts["dropped"] == 1
    with server.client() as client:
        assert client.keys() == []


async def test_too_many_that_wait_to_be_written_are_not(server, monkeypatch):
    monkeypatch.setattr(shared_tier, "_WRITES", 1)
    async with replica(server.url) as (made, store):
        made._writer.cancel()
        await computed(made, store)
        store.flush()
        await computed(made, store, Header(b"z" * 32, Modality.IMAGE, Grid(1, 2, 2), 1))
        assert made.counts["dropped"] == 1


async def test_password_and_tls_are_taken_from_the_address(tmp_path):
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "roots.pem")
    with valkey_server.server(password="s3cret") as locked, valkey_server.proxy(locked, context) as door:
        good = f"rediss://:s3cret@127.0.0.1:{door.port}/1?ssl_ca_certs={tmp_path}/roots.pem"
        async with replica(good) as (made, store):
            await computed(made, store)
            await written(made)
            assert await made.find(HEADER.key, "") == HEADER
        for bad in (good.replace("s3cret", "guess"), good.partition("?")[0]):
            async with replica(bad) as (made, _):
                assert await made.find(HEADER.key, "") is None
                assert made.counts["errors"] == 1


@given(st.binary(max_size=200))
def test_no_bytes_are_read_as_a_header_or_a_chunk_that_were_not_written_as_one(data):
    with pytest.raises(Garbage):
        tier_format.read_header(data, HEADER.key, "", LAYOUT)
    with pytest.raises(Garbage):
        tier_format.read_chunk(data, HEADER.key, 0, memoryview(bytearray(max(0, len(data) - 4))))


@given(st.lists(st.sampled_from(["ask", "good", "bad", "leave", "later"]), max_size=60))
def test_the_breaker_never_shuts_for_good_and_never_lets_two_try(steps):
    clock = [0.0]
    breaker, asking = Breaker(lambda: clock[0]), 0
    for step in steps:
        if step == "later":
            clock[0] += 60
        elif step == "ask":
            asking += breaker.allows()
        elif asking:
            asking -= 1
            {"good": breaker.succeeded, "bad": breaker.failed, "leave": breaker.abandoned}[step]()
    clock[0] += 60
    if asking == 0:
        assert breaker.allows()
        if breaker.is_open:
            assert not breaker.allows()


def test_many_that_fail_together_are_one_failure_to_the_breaker():
    clock = [0.0]
    breaker = Breaker(lambda: clock[0])
    asking = sum(breaker.allows() for _ in range(16))
    for _ in range(asking):
        breaker.failed()
    assert breaker.is_open
    for rest in (0.5, 1.0, 2.0):
        clock[0] += 0.9 * rest
        assert not breaker.allows()
        clock[0] += 0.1 * rest
        assert breaker.allows()
        breaker.failed()


async def _turn(made: SharedTier) -> Header | None:
    async with made.turn(HEADER.key, "") as turn:
        return turn.found


def _until_asked_twice(server) -> None:
    """Someone who does not hold the lock has asked for it at least twice since now."""

    def asked() -> int:
        return client.info("commandstats").get("cmdstat_set", {}).get("calls", 0)

    with server.client() as client:
        before = asked()
        until(lambda: asked() >= before + 2, "another replica waits")
