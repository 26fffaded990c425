"""Replicas over one real shared store, with fake decoders and workers: who computes, who loads, and what is left."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import random
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from common.errors import InvalidInput, NotFound, TwinlensError, Unavailable
from common.media.item import Key, Url
from encoder_service.item import Inspection
from encoder_service.worker.messages import BatchFailed
from tests.unit.encoder_service.engines import LAYOUT, PICTURES, SEEN, encoder, item, rows
from tests.unit.encoder_service.fakes import DONE, FakeDecoders, turns
from tests.waiting import eventually


async def written(made, count: int) -> None:
    await eventually(lambda: made.pipeline.shared_store.counts["written"] >= count, "the rows are shared")


async def test_replicas_compute_an_item_once_between_them(monkeypatch, server):
    async with (
        encoder(monkeypatch, shared=server.url) as (one, first),
        encoder(monkeypatch, shared=server.url) as (two, second),
        encoder(monkeypatch, shared=server.url) as (three, third),
    ):
        await asyncio.gather(*(rows(each, item(n)) for n in range(3) for each in (one, two, three) for _ in range(5)))
        assert sum(len(batch.pieces) for each in (first, second, third) for batch in each.batches) == 3
        totals = [each.totals for each in (one, two, three)]
        assert sum(each.encoded for each in totals) == sum(each.misses for each in totals) == 3
        assert sum(each.hits for each in totals) == 42


async def test_what_is_in_the_shared_store_is_neither_decoded_nor_computed(monkeypatch, server):
    decoders = FakeDecoders(SEEN)
    async with (
        encoder(monkeypatch, shared=server.url) as (one, _),
        encoder(monkeypatch, shared=server.url, decoders=decoders) as (two, worker),
    ):
        await rows(one, item(salt="mine"))
        await written(one, 1)
        async with two.ticket(item(salt="mine"), rows=False) as ticket:
            header = await two.resolve(ticket)
            assert ticket.cached
        assert await two.has([header.key], "theirs") == [False]
        assert await two.has([header.key, b"x" * 32], "mine") == [True, False]
        assert await rows(two, item(source=Key(header.key), salt="mine"))
        for source, salt in ((Key(header.key), "theirs"), (Key(b"x" * 32), "mine")):
            with pytest.raises(NotFound, match="no such key is in the store"):
                await rows(two, item(source=source, salt=salt))
        assert (decoders.jobs, worker.batches, two.totals.encoded) == (0, [], 0)


async def test_content_that_comes_while_its_key_is_looked_for_is_used(monkeypatch, server):
    async with encoder(monkeypatch, shared=server.url) as (one, worker):
        async with one.ticket(item(), rows=False) as ticket:
            key = (await one.resolve(ticket)).key
        by_key = asyncio.create_task(rows(one, item(source=Key(key))))
        by_content = asyncio.create_task(rows(one, item()))
        await asyncio.gather(by_content, return_exceptions=True)
        assert await by_key in (True, False)
        assert len(worker.batches) == 1


async def test_rows_that_are_spoilt_on_the_way_are_computed(monkeypatch, server):
    async with (
        encoder(monkeypatch, shared=server.url) as (one, _),
        encoder(monkeypatch, shared=server.url) as (two, worker),
    ):
        await rows(one, item())
        await written(one, 1)
        with server.client() as client:
            (name,) = client.keys("twinlens:rows:*")
            client.hset(name, "0", b"\0" * (4 * LAYOUT.row_bytes + 4))
        assert not await rows(two, item())
        assert (len(worker.batches), two.pipeline.shared_store.counts["garbage"], two.totals.hits) == (1, 1, 0)


def address(number: int, key: bytes) -> Url:
    """An address that gives a picture, and had this key before."""
    return Url(f"data:image/png;base64,{base64.b64encode(PICTURES[number]).decode()}", key)


async def lost(made, server, source: Url | Key, key: bytes) -> bool:
    """Asks for what is known by its key, has the shared store lose the rows when the header is out, and waits for them;
    whether rows came that fit the header."""
    async with made.ticket(item(source=source), rows=False) as ticket:
        header = await made.resolve(ticket)
        assert header.key == key
        with server.client() as client:
            client.delete(*client.keys("twinlens:rows:*"))
        async with made.ticket(item(source=Key(key)), rows=True) as wanting:
            assert await made.resolve(wanting) == header
            await wanting.ready()
            return wanting.entry.header == header


@asynccontextmanager
async def shared_picture(monkeypatch, server):
    """A replica that has computed nothing, its worker, and the key of picture 3, whose rows are in the shared store."""
    async with (
        encoder(monkeypatch, shared=server.url) as (one, _),
        encoder(monkeypatch, shared=server.url) as (two, worker),
    ):
        await rows(one, item(3))
        await written(one, 1)
        async with one.ticket(item(3), rows=False) as ticket:
            key = (await one.resolve(ticket)).key
        yield two, worker, key


async def test_rows_of_an_address_that_are_lost_after_the_header_are_fetched_and_computed(monkeypatch, server):
    async with shared_picture(monkeypatch, server) as (made, worker, key):
        assert await lost(made, server, address(3, key), key)
        assert len(worker.batches) == 1
        assert await made.has([key], "") == [True]


async def test_content_fetched_for_lost_rows_counts_as_held_once_who_gave_its_address_has_left(monkeypatch, server):
    async with shared_picture(monkeypatch, server) as (made, worker, key):
        monkeypatch.setattr(worker, "_answers", None)
        async with AsyncExitStack() as gave_address, made.ticket(item(source=Key(key)), rows=True) as wanting:
            told = await gave_address.enter_async_context(made.ticket(item(source=address(3, key)), rows=False))
            await made.resolve(told)
            with server.client() as client:
                client.delete(*client.keys("twinlens:rows:*"))
            await made.resolve(wanting)
            while not worker.batches:
                await turns(1)
            await gave_address.aclose()
            assert made._admission.bytes == len(PICTURES[3])
            worker.say(DONE)
            await wanting.ready()


async def test_a_key_that_is_nowhere_is_no_item_that_failed(monkeypatch, server):
    async with shared_picture(monkeypatch, server) as (made, _, _key):
        with pytest.raises(NotFound):
            await rows(made, item(source=Key(b"x" * 32)))
        assert not await rows(made, item(source=address(4, b"y" * 32)))
        assert (made.totals.failed, made.totals.encoded) == (0, 1)


async def test_an_address_that_gives_something_else_by_then_is_told_as_that(monkeypatch, server):
    async with shared_picture(monkeypatch, server) as (made, worker, key):
        with pytest.raises(Unavailable) as error:
            await lost(made, server, address(4, key), key)
        assert (error.value.reason, worker.batches) == ("MEDIA_CHANGED", [])
        assert not await rows(made, item(source=address(4, key))), "the next one is right, and another item"
        assert await made.has([key], "") == [False]


async def test_rows_that_are_made_otherwise_than_the_header_said_are_not_sent_behind_it(monkeypatch, server):
    """Replicas with other limits, say, may share a store: the announced rows are lost, and new ones would differ."""
    async with shared_picture(monkeypatch, server) as (made, _, key):
        made.pipeline.media.decoders.seen = Inspection(112, 112)
        with pytest.raises(Unavailable) as error:
            await lost(made, server, address(3, key), key)
        assert error.value.reason == "MEDIA_CHANGED"
        async with made.ticket(item(3), rows=True) as ticket:
            assert (await made.resolve(ticket)).tokens == 16
            await ticket.ready()


async def test_whoever_waits_for_another_s_address_hears_of_its_failure_by_a_place_of_its_own(monkeypatch, server):
    async with shared_picture(monkeypatch, server) as (made, _, key):
        last = dataclasses.replace(item(source=Key(key)), field="items[5]")
        async with made.ticket(item(source=address(4, key)), rows=False) as first:
            await made.resolve(first)
            with server.client() as client:
                client.delete(*client.keys("twinlens:rows:*"))
            async with made.ticket(last, rows=True) as wanting:
                await made.resolve(wanting)
                for ticket, place in ((wanting, "items[5]"), (first, "items[0]")):
                    with pytest.raises(Unavailable) as error:
                        await ticket.ready()
                    assert (error.value.reason, error.value.field) == ("MEDIA_CHANGED", place)


async def test_content_that_comes_while_an_address_is_fetched_is_used_where_that_fails(monkeypatch, server):
    async with shared_picture(monkeypatch, server) as (made, worker, key):
        fetched, fetch = asyncio.Event(), made._contents.fetched

        @asynccontextmanager
        async def slow_fetch(*wanted):
            await fetched.wait()
            async with fetch(*wanted) as found:
                yield found

        async with made.ticket(item(source=address(4, key)), rows=True) as ticket:
            with server.client() as client:
                client.hset(f"twinlens:rows:{key.hex()}", "0", b"spoilt")
            monkeypatch.setattr(made._contents, "fetched", slow_fetch)
            await made.resolve(ticket)
            await eventually(lambda: ticket.stage == "fetch", "the address is fetched")
            by_content = asyncio.create_task(rows(made, item(3)))
            await turns()
            fetched.set()
            assert not await by_content
            await ticket.ready()
            assert len(worker.batches) == 1


async def test_a_key_alone_whose_rows_are_lost_after_the_header_is_not_found(monkeypatch, server):
    async with shared_picture(monkeypatch, server) as (made, _, key):
        with pytest.raises(NotFound):
            await lost(made, server, Key(key), key)


@pytest.mark.parametrize("seed", range(15))
async def test_leaving_at_any_moment_leaves_nothing_here_or_there(monkeypatch, server, seed):
    """As in test_encode, with two replicas: no lock, no pin and no flight is left, whoever went when."""
    chance = random.Random(seed)
    decoders = FakeDecoders(SEEN, turns=chance.randint(0, 4))

    def answers(_):
        return chance.choice([DONE, DONE, BatchFailed(why="chance")])

    settings = {"answers": answers, "decoders": decoders, "store_bytes": 1024, "shared": server.url}
    async with encoder(monkeypatch, **settings) as (one, _), encoder(monkeypatch, **settings) as (two, _):
        tasks = [asyncio.create_task(rows(chance.choice((one, two)), item(chance.randrange(4)))) for _ in range(30)]
        for task in chance.sample(tasks, 18):
            await turns(chance.randint(0, 4))
            await asyncio.sleep(chance.choice((0, 0, 0.001)))
            task.cancel()
            one.check_integrity()
            two.check_integrity()
            decoders.failure = InvalidInput("chance") if chance.random() < 0.2 else None
        decoders.failure = None
        for each in await asyncio.gather(*tasks, return_exceptions=True):
            assert not isinstance(each, BaseException) or isinstance(each, TwinlensError | asyncio.CancelledError)
    with server.client() as client:
        assert client.keys("twinlens:lock:*") == []
