"""The shared store's link to its server: down, frozen, late, locked or none at all, it costs little and ends."""

from __future__ import annotations

import asyncio
import ssl

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from common.media.item import Grid, Header, Modality
from encoder_service.engine.shared_store import SharedStoreMiss
from encoder_service.engine.shared_store_client import Breaker
from tests import valkey_server
from tests.unit.encoder_service.shared_stores import HEADER, Clock, computed, loaded, replica, written


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
            with pytest.raises(SharedStoreMiss):
                await loaded(made, HEADER)
            await computed(made, store)
            await written(made)
            assert made._writers
            assert not any(writer.done() for writer in made._writers)
            assert (made.counts["hits"], made.counts["written"]) == (0, 0)


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
