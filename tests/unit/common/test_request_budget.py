"""The budget of bytes over all requests on their way in: what counts, who gives way, and what callers see of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from common.errors import Exhausted, TwinlensError
from common.rpc import request_budget
from common.rpc.request_budget import SMALL, UNREAD, RequestBudget, max_large_bytes
from common.rpc.server import ServerConfig
from common.rpc.tcp_connections import Address
from tests.clock import turns
from tests.launch import Service, launch
from tests.raw_http2 import RawConnection, message
from tests.waiting import eventually, until
from twinlens import LlmClient, v1
from twinlens import TwinlensError as ClientError

MIB = 1 << 20
TOKENIZE = "/twinlens.v1.LlmService/Tokenize"
HEALTH = "/grpc.health.v1.Health/Check"


class Told:
    """A call that remembers what it was ended with."""

    def __init__(self) -> None:
        self.reason = ""

    def end(self, error: TwinlensError) -> None:
        assert isinstance(error, Exhausted)
        assert error.retry_after
        self.reason = error.reason


class Kernel:
    """Says how much has come over each connection, as a test has it."""

    def __init__(self) -> None:
        self.bytes: dict[Address, int | None] = {}

    def __call__(self, far: Address) -> int | None:
        return self.bytes.get(far, 0)


class Crowd:
    """A budget of 64 MiB for messages of up to 20, and connections whose messages are coming. What is said of none of
    its times takes for ever."""

    def __init__(self, **settings: Any) -> None:
        self.kernel = Kernel()
        never = {"still_seconds": 3600, "stall_seconds": 3600}
        settings = {"wait_seconds": 0.05, "foreseen_seconds": 0, **never, **settings}
        self.budget = RequestBudget(64 * MIB, 20 * MIB, received=self.kernel, **settings)
        self.open = AsyncExitStack()

    async def comes(self, port: int, stated: int = 0) -> tuple[Told, Callable[[int], None]]:
        told = Told()
        return told, await self.open.enter_async_context(self.budget.arrival(f"ipv4:10.0.0.1:{port}", told, stated))

    def brings(self, port: int, size: int | None) -> None:
        self.kernel.bytes["10.0.0.1", port] = size

    async def looked(self, holds: Callable[[], object]) -> None:
        """The budget has looked, and then this holds."""
        await eventually(holds, "it has looked")


@pytest.fixture
async def crowd() -> AsyncIterator[Crowd]:
    crowd = Crowd()
    async with crowd.open:
        yield crowd
    assert crowd.budget.arriving == 0


async def test_the_budget_lets_in_a_message_of_which_two_copies_fit_it() -> None:
    assert max_large_bytes(64 * MIB) == 28 * MIB


async def test_what_comes_counts_twice_and_what_is_here_once(crowd: Crowd) -> None:
    async with crowd.budget.arrival("ipv4:10.0.0.1:1", Told()) as arrived:
        assert crowd.budget.arriving == 2 * UNREAD
        crowd.brings(1, 10 * MIB)
        await crowd.looked(lambda: crowd.budget.arriving == 20 * MIB)
        arrived(10 * MIB)
    assert (crowd.budget.arriving, crowd.budget.held) == (0, 10 * MIB)
    crowd.budget.release(10 * MIB)
    await crowd.looked(lambda: crowd.budget.held == 0)


async def test_of_many_the_largest_give_way_until_the_rest_fits(crowd: Crowd) -> None:
    calls = {port: (await crowd.comes(port))[0] for port in range(1, 7)}
    for port in calls:
        crowd.brings(port, port * 2 * MIB)
    await crowd.looked(lambda: calls[6].reason)
    assert [port for port, call in calls.items() if call.reason == "TOO_MANY_BYTES"] == [5, 6]
    assert crowd.budget.arriving == 2 * (2 + 4 + 6 + 8) * MIB


async def test_who_had_said_how_much_would_come_does_not_give_way_while_it_comes() -> None:
    crowd = Crowd()
    async with crowd.open:
        coming = [(await crowd.comes(port, stated=9 * MIB))[0] for port in (1, 2, 3)]
        with pytest.raises(Exhausted) as full:
            await crowd.comes(4, stated=8 * MIB)
        assert (full.value.reason, full.value.retry_after) == ("TOO_MANY_BYTES", 1.0)
        assert not any(call.reason for call in coming)


async def test_who_stands_still_gives_way_to_who_comes() -> None:
    crowd = Crowd(still_seconds=0)
    async with crowd.open:
        silent = [(await crowd.comes(port, stated=9 * MIB))[0] for port in (1, 2, 3)]
        assert not (await crowd.comes(4, stated=8 * MIB))[0].reason
        assert sorted(call.reason for call in silent) == ["", "", "TOO_MANY_BYTES"]


async def test_small_messages_come_where_large_ones_have_no_room(crowd: Crowd) -> None:
    _, arrived = await crowd.comes(1)
    arrived(56 * MIB)
    with pytest.raises(Exhausted):
        await crowd.comes(2, stated=SMALL + 1)
    assert not (await crowd.comes(3, stated=SMALL))[0].reason
    assert not (await crowd.comes(4))[0].reason


async def test_who_sends_more_than_he_said_gives_way_before_those_who_did_not(crowd: Crowd) -> None:
    honest, liar = (await crowd.comes(1, stated=18 * MIB))[0], (await crowd.comes(2, stated=UNREAD))[0]
    crowd.brings(1, 18 * MIB)
    crowd.brings(2, 15 * MIB)
    await crowd.looked(lambda: liar.reason)
    assert (liar.reason, honest.reason) == ("TOO_MANY_BYTES", "")


async def test_messages_of_one_connection_share_what_has_come_over_it(crowd: Crowd) -> None:
    async with crowd.budget.arrival("ipv4:10.0.0.1:1", Told()) as before:
        crowd.brings(1, 10 * MIB)
        before(10 * MIB)
    async with crowd.budget.arrival("ipv4:10.0.0.1:1", Told()) as first:
        crowd.brings(1, 13 * MIB)
        async with crowd.budget.arrival("ipv4:10.0.0.1:1", Told()) as second:
            assert crowd.budget.arriving == 2 * 3 * MIB
            second(MIB)
        assert crowd.budget.arriving == 2 * 2 * MIB
        third = await crowd.comes(1)
        first(2 * MIB)
    assert crowd.budget.arriving == 2 * UNREAD, "what came before the third began is not the third's"
    assert not third[0].reason


async def test_who_has_filled_his_window_waits_until_there_is_room_for_the_largest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_budget, "_CLAIM_SECONDS", 3600)
    crowd = Crowd(wait_seconds=60)
    for port in (1, 2, 3):
        crowd.brings(port, UNREAD)
    async with crowd.open:
        _, arrived = await crowd.comes(1)
        assert crowd.budget.arriving == 2 * 20 * MIB
        others = [asyncio.create_task(crowd.comes(port)) for port in (2, 3)]
        await asyncio.sleep(0)
        assert crowd.budget.arriving == 2 * 20 * MIB + 2 * UNREAD, "they wait"
        assert not (await crowd.comes(4))[0].reason, "a message that fits its window does not"
        arrived(1000)
        await crowd.open.aclose()  # the first is here, and was small
        for other in others:
            assert not (await other)[0].reason
            await crowd.open.aclose()


async def test_what_comes_fast_counts_before_it_is_here() -> None:
    crowd = Crowd(foreseen_seconds=10)
    async with crowd.open:
        await crowd.comes(1)
        crowd.brings(1, 2 * MIB)
        await crowd.looked(lambda: crowd.budget.arriving > 2 * 4 * MIB)


async def test_a_flood_of_frames_counts_with_their_heads(crowd: Crowd) -> None:
    """Of 20 MiB in frames of a byte, 200 come over the wire, and as many lie in memory."""
    told, _ = await crowd.comes(1)
    crowd.brings(1, 24 * MIB)
    await crowd.looked(lambda: told.reason)
    assert told.reason == "TOO_MANY_BYTES"


async def test_what_brings_nothing_is_given_up() -> None:
    crowd = Crowd(stall_seconds=0.1)
    async with crowd.open:
        told, _ = await crowd.comes(1)
        await crowd.looked(lambda: told.reason)
        assert told.reason == "REQUEST_TOO_SLOW"


async def test_a_service_that_stood_still_takes_nobody_for_slow() -> None:
    """What came before that has not been read yet."""
    crowd = Crowd(stall_seconds=0.2)
    async with crowd.open:
        crowd.brings(1, 1000)
        told, _ = await crowd.comes(1)
        time.sleep(0.5)  # noqa: ASYNC251
        await turns()
        assert not told.reason
        await crowd.looked(lambda: told.reason)


async def test_where_nothing_can_be_measured_a_message_counts_as_the_largest(crowd: Crowd) -> None:
    crowd.brings(1, None)
    await crowd.comes(1)
    assert crowd.budget.arriving == 2 * 20 * MIB


# What real callers see, of a service in a process of its own.

BUDGET = ServerConfig().max_inflight_bytes
LARGEST = ServerConfig().max_message_bytes


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with launch("tests.unit.common.plain_service", "--request-stall-seconds=2") as running:
        with LlmClient(running.address) as client:
            client.tokenize("warm")
        yield running


def resident(service: Service) -> int:
    """Bytes of memory that it has."""
    return int(Path(f"/proc/{service.pid}/statm").read_text().split()[1]) * 4096


def question(size: int) -> bytes:
    """A request of about this size, in its frame."""
    body = v1.TokenizeRequest(text="a" * size).SerializeToString()
    return message(len(body), body)


class Watched:
    """Runs callers at once, and watches what the service's memory grows by and whether others are answered."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._before = resident(service)
        self._over = threading.Event()
        self.peak = 0
        self.answered: list[int] = []
        self.refused: list[ClientError] = []

    def run(self, caller: Callable[[int], bytes], count: int) -> Sequence[bytes]:
        others = [threading.Thread(target=each) for each in (self._watch, self._ask)]
        for each in others:
            each.start()
        try:
            with ThreadPoolExecutor(count) as crowd:
                return list(crowd.map(caller, range(count)))
        finally:
            self._over.set()
            for each in others:
                each.join()

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self.peak = max(self.peak, resident(self._service) - self._before)

    def _ask(self) -> None:
        with LlmClient(self._service.address) as client:
            while not self._over.wait(0.05):
                try:
                    self.answered += [client.tokenize("x" * size)[0] for size in (10, 600_000)]
                except ClientError as error:
                    self.refused.append(error)

    def grown(self) -> int:
        return resident(self._service) - self._before


@pytest.mark.parametrize("method", [TOKENIZE, pytest.param(HEALTH, marks=pytest.mark.soak)])
def test_a_crowd_that_falls_silent_costs_the_budget_and_is_told(service: Service, method: str) -> None:
    def silent(_: int) -> bytes:
        with RawConnection(service.address) as caller:
            stream = caller.call(method)
            caller.send(stream, message(60 * MIB) + bytes(59 * MIB))
            assert caller.until_ended(stream)
            return caller.trailers[stream]

    watched = Watched(service)
    ends = watched.run(silent, 20)
    assert all(b"grpc-status\x018" in end for end in ends), "RESOURCE_EXHAUSTED"
    assert watched.peak < BUDGET + 64 * MIB
    assert watched.answered
    assert not watched.refused
    until(lambda: watched.grown() < 8 * MIB, "memory is back")


def test_a_crowd_of_whole_messages_costs_the_budget_and_one_that_is_read(service: Service) -> None:
    whole = question(60 * MIB)

    def ask(_: int) -> bytes:
        with RawConnection(service.address) as caller:
            stream = caller.call(TOKENIZE)
            caller.send(stream, whole, end=True)
            assert caller.until_ended(stream)
            return caller.trailers[stream]

    watched = Watched(service)
    ends = watched.run(ask, 24)
    served = sum(b"grpc-status\x010" in end for end in ends)
    assert served
    assert served + sum(b"grpc-status\x018" in end for end in ends) == 24
    assert watched.peak < BUDGET + 3 * 60 * MIB
    assert watched.answered
    assert not watched.refused
    until(lambda: watched.grown() < 8 * MIB, "memory is back")


@pytest.mark.soak
def test_frames_of_a_byte_do_not_cost_many_times_what_is_in_them(service: Service) -> None:
    def drip(_: int) -> bytes:
        with RawConnection(service.address) as caller:
            stream = caller.call(TOKENIZE)
            caller.send(stream, message(60 * MIB))
            caller.send(stream, bytes(4 * MIB), piece=1)
            assert caller.until_ended(stream)
            return caller.trailers[stream]

    watched = Watched(service)
    assert all(b"grpc-status\x018" in end for end in watched.run(drip, 3))
    assert watched.peak < BUDGET


def test_a_call_without_a_message_and_one_too_large_are_told_so(service: Service) -> None:
    with RawConnection(service.address) as caller:
        empty, large = caller.call(TOKENIZE), caller.call(TOKENIZE)
        caller.send(empty, b"", end=True)
        caller.send(large, message(LARGEST + 1))
        assert caller.until_ended(empty)
        assert caller.until_ended(large)
        assert b"grpc-status\x013" in caller.trailers[empty], "INVALID_ARGUMENT"
        assert b"grpc-status\x018" in caller.trailers[large]
    until(lambda: "MALFORMED_MESSAGE" in service.log.read_text(), "it is logged")


def test_who_leaves_in_the_middle_of_a_message_has_left_and_sent_no_wrong_one(service: Service) -> None:
    before = service.log.read_text().count("CANCELLED")
    malformed = service.log.read_text().count("MALFORMED_MESSAGE")
    with RawConnection(service.address) as caller:
        stream = caller.call(TOKENIZE)
        caller.send(stream, message(20 * MIB) + bytes(1 * MIB))
    until(lambda: service.log.read_text().count("CANCELLED") > before, "it has left")
    assert service.log.read_text().count("MALFORMED_MESSAGE") == malformed


def test_what_is_not_asked_for_is_not_taken(service: Service) -> None:
    """Behind a message that was read, gRPC takes a window, and no more."""
    with RawConnection(service.address) as caller:
        stream = caller.call("/twinlens.v1.LlmService/Generate")
        caller.send(stream, message(0))
        assert caller.send(stream, message(20 * MIB) + bytes(19 * MIB), seconds=2) <= 2 * UNREAD


def test_health_checks_take_no_long_message(service: Service) -> None:
    with RawConnection(service.address) as caller:
        stream = caller.call(HEALTH)
        caller.send(stream, message(1 * MIB) + bytes(1 * MIB), end=True)
        assert caller.until_ended(stream)
        assert b"grpc-status\x013" in caller.trailers[stream]
