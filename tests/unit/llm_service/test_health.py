"""Whether an encoder lives: busy is not dead, what was known before a suspicion answers nothing, and who is blamed."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc
import pytest

from common.errors import Unavailable
from common.rows.wire import DType
from common.rpc.channel import ChannelSecurity, open_channel
from llm_service.encoders.breaker import Quarantine
from llm_service.encoders.health import EncoderHealth, Verdict
from llm_service.encoders.pool import EncoderPool, WatchedReplica
from llm_service.encoders.replica import Replica
from llm_service.encoders.settings import EncoderSettings
from llm_service.encoders.transports import shared_memory
from tests.unit.llm_service.scripted import DIGEST, LAYOUT, ScriptedEncoder, bench, hangs_after_the_header
from twinlens import v1

ANSWERS, LATE, GONE = Verdict.ANSWERS, Verdict.LATE, Verdict.GONE
ITEM = b"item"


@pytest.fixture
def quarantine() -> Quarantine:
    return Quarantine()


@pytest.fixture
def health(quarantine: Quarantine) -> EncoderHealth:
    """Of an encoder that has answered."""
    made = EncoderHealth("here:1", quarantine)
    made.judge(ANSWERS)
    return made


def test_one_that_never_answered_is_neither_used_nor_a_last_resort(quarantine: Quarantine) -> None:
    new = EncoderHealth("here:1", quarantine)
    assert (new.answers, new.unsure) == (False, False)
    new.judge(LATE)
    assert (new.answers, new.unsure) == (False, False)


def test_being_late_once_is_no_end_and_twice_is(health: EncoderHealth) -> None:
    health.judge(LATE)
    assert (health.answers, health.unsure) == (False, True)
    health.judge(ANSWERS)
    health.judge(LATE)
    assert (health.answers, health.unsure) == (False, True)
    health.judge(LATE)
    assert (health.answers, health.unsure) == (False, False)
    health.judge(ANSWERS)
    assert (health.answers, health.unsure) == (True, True)


def test_one_that_is_gone_is_no_last_resort(health: EncoderHealth) -> None:
    health.suspect()
    assert (health.answers, health.unsure) == (False, True)
    health.judge(GONE)
    assert (health.answers, health.unsure) == (False, False)


def test_an_item_is_blamed_when_the_encoder_is_gone_and_not_while_it_is_late(
    health: EncoderHealth, quarantine: Quarantine
) -> None:
    health.suspect(ITEM)
    health.judge(LATE)
    assert not quarantine.deaths(ITEM)
    health.judge(LATE)
    assert quarantine.deaths(ITEM) == 1


def test_an_item_whose_encoder_answers_after_all_is_not_blamed(health: EncoderHealth, quarantine: Quarantine) -> None:
    health.suspect(ITEM)
    health.judge(ANSWERS)
    health.judge(GONE)
    assert not quarantine.deaths(ITEM)


async def test_what_was_asked_before_a_suspicion_does_not_answer_it(
    health: EncoderHealth, quarantine: Quarantine
) -> None:
    """The encoder answers a question and dies; a stream breaks before the answer is taken in."""
    verdicts = iter([ANSWERS, GONE])
    asked = asyncio.Event()

    async def check() -> Verdict:
        verdict = next(verdicts, None)
        if verdict is ANSWERS:
            health.suspect(ITEM)
        elif verdict is None:
            asked.set()
            await asyncio.Event().wait()
        return verdict

    watching = asyncio.create_task(health.watch(check, asyncio.Event()))
    await asked.wait()
    await health.judged()
    assert quarantine.deaths(ITEM) == 1
    assert not health.answers
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_nobody_waits_for_a_verdict_on_an_encoder_that_was_forgotten(health: EncoderHealth) -> None:
    async def check() -> Verdict:
        await asyncio.Event().wait()
        return ANSWERS

    watching = asyncio.create_task(health.watch(check, asyncio.Event()))
    await asyncio.sleep(0)
    health.suspect(ITEM)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await health.judged()


@asynccontextmanager
async def replica_of_a_pool(quarantine: Quarantine) -> AsyncIterator[tuple[EncoderPool, Replica]]:
    """A pool that knows one encoder, which nobody watches."""
    pool = EncoderPool([], EncoderSettings(digest=DIGEST, layout=LAYOUT, merge=2))
    replica = Replica("127.0.0.1:1", "", pool.settings, quarantine)
    pool.replica_set.known[replica.address] = WatchedReplica(replica, asyncio.create_task(asyncio.Event().wait()))  # type: ignore[arg-type]
    replica.health.judge(ANSWERS)
    try:
        yield pool, replica
    finally:
        await pool.stop()


async def test_the_only_encoder_is_used_though_it_was_late_or_is_suspected(quarantine: Quarantine) -> None:
    async with replica_of_a_pool(quarantine) as (pool, replica):
        replica.health.judge(LATE)
        assert not replica.usable
        assert await pool.pick(ITEM) is replica
        replica.health.judge(ANSWERS)
        replica.health.suspect()
        assert await pool.pick(ITEM) is replica
        replica.health.judge(GONE)
        with pytest.raises(Unavailable) as error:
            await pool.pick(ITEM)
        assert error.value.reason == "NO_ENCODER"


async def test_an_encoder_that_was_gone_begins_anew() -> None:
    async with bench(ScriptedEncoder()) as b:
        await b.usable(1)
        (replica,) = b.pool.replicas
        for _ in range(9):
            replica.breaker.failed(replica.breaker.now())
        assert not replica.usable
        replica.health.judge(GONE)
        await b.usable(1)
        assert replica.breaker.failures == 0


async def test_a_question_that_failed_says_that_an_encoder_is_gone_only_where_it_cannot_be_busy(
    quarantine: Quarantine,
) -> None:
    async with replica_of_a_pool(quarantine) as (_, replica):
        asked = time.monotonic()
        assert replica._failed(grpc.StatusCode.RESOURCE_EXHAUSTED, 0.0) is ANSWERS
        assert replica.full_until > asked, "it is as good as it says: with too many calls, and left alone for a moment"
        assert replica._failed(grpc.StatusCode.UNAVAILABLE, 0.0) is GONE
        replica.health.hear()
        assert replica._failed(grpc.StatusCode.DEADLINE_EXCEEDED, replica.health.last_heard - 1) is ANSWERS
        assert replica._failed(grpc.StatusCode.DEADLINE_EXCEEDED, replica.health.last_heard + 1) is LATE
        replica.health.suspect()
        assert replica._failed(grpc.StatusCode.DEADLINE_EXCEEDED, replica.health.last_heard - 1) is LATE


async def test_an_encoder_that_answers_nonsense_is_gone_for_now_and_is_asked_again(quarantine: Quarantine) -> None:
    """What is no message comes out of gRPC as None."""

    async def nothing(*_: object, **__: object) -> None:
        return None

    async with replica_of_a_pool(quarantine) as (_, replica):
        replica._connections.stub = SimpleNamespace(GetInfo=nothing, GetLoad=nothing)  # type: ignore[assignment]
        assert await replica._check() is GONE
        assert "not one of our messages" in replica.trouble


async def test_an_encoder_that_answers_is_not_used_before_streams_can_go_there() -> None:
    async with bench(ScriptedEncoder(), check_seconds=600) as b:
        await b.usable(1)
        (replica,) = b.pool.replicas
        channels = replica._connections._channels.calls
        with socket.socket() as deaf:
            deaf.bind(("127.0.0.1", 0))
            there = channels[0]
            channels[0] = open_channel(f"127.0.0.1:{deaf.getsockname()[1]}", ChannelSecurity())
            assert await replica._check() is LATE
            assert "connection" in replica.trouble
            await channels[0].close()
        channels[0] = there
        assert await replica._check() is ANSWERS


RESET = (
    (grpc.StatusCode.CANCELLED, "CANCELLED"),
    (grpc.StatusCode.UNAVAILABLE, "Stream removed (Received RST_STREAM with error code 7)"),
)


@pytest.mark.parametrize(("code", "details"), RESET)
async def test_an_encoder_whose_grpc_takes_no_more_calls_is_there(
    quarantine: Quarantine, code: grpc.StatusCode, details: str
) -> None:
    async def resets(*_: object, **__: object) -> None:
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)

    async with replica_of_a_pool(quarantine) as (_, replica):
        replica._connections.stub = SimpleNamespace(GetInfo=resets, GetLoad=resets)  # type: ignore[assignment]
        assert await replica._check() is ANSWERS
        assert replica.full
        replica.health.judge(GONE)
        assert await replica._check() is GONE, "of one that has not answered before, it says nothing"


async def test_memory_that_could_not_be_shared_is_tried_again_later_and_not_at_every_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[object] = []
    region = SimpleNamespace(watch=lambda _: None)
    ends = iter([OSError("too many open files"), RuntimeError("can't start new thread")])

    def opened(*given: object) -> object:
        tries.append(given)
        if (error := next(ends, None)) is not None:
            raise error
        return region

    monkeypatch.setattr(shared_memory.Region, "open", opened)
    info = v1.EncoderServiceGetInfoResponse(local_socket=v1.LocalSocket(name="@twinlens-there", secret=b"s" * 32))
    memory = shared_memory.SharedMemory("", "", DType.FLOAT32, lambda: None)
    for passed, tried in ((0, 1), (1, 1), (30, 2), (1, 2), (30, 3), (30, 3)):
        memory._again -= passed
        await memory.on_info(info)
        assert len(tries) == tried
    assert memory.region is region


async def test_memory_of_an_encoder_that_has_left_is_let_go_though_the_service_stops_first() -> None:
    closed: list[bool] = []
    async with bench(ScriptedEncoder([hangs_after_the_header])) as b:
        await b.usable(1)
        (entry,) = await b.land(b"picture")
        (replica,) = b.pool.replicas
        replica._transports = [*replica._transports, SimpleNamespace(close=lambda: closed.append(True))]  # type: ignore[list-item]
        b.pool.replica_set.forget(replica.address)  # which its stream may take
        await asyncio.sleep(0)
        assert not closed
        await b.pool.stop()
        assert closed
        b.cache.release(entry)
