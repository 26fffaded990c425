"""What the log says where no encoder can be used: when, how often, and which option may help."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from common.rows.wire import DType, RowLayout
from common.rpc import channel as grpc_channel
from common.rpc.channel import ChannelSecurity, open_channel
from llm_service.encoders.availability_log import AvailabilityLog
from llm_service.encoders.obstacle_hints import hint
from llm_service.encoders.pool import EncoderPool
from llm_service.encoders.settings import EncoderSettings
from tests.unit.llm_service.scripted import ScriptedEncoder, bench, eventually
from twinlens.v1 import encoder_pb2
from twinlens.v1.encoder_pb2_grpc import EncoderServiceStub

PLAIN, ROOTS = ChannelSecurity(), ChannelSecurity(ca="ca.pem")
PAPERS = ChannelSecurity(ca="ca.pem", cert="cert.pem", key="key.pem")
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
USABLE, GONE = "an encoder can be used", "an encoder cannot be used"
NO_VERSION = "Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: WRONG_VERSION_NUMBER: OK"


@dataclass
class FakeReplica:
    """What is looked at."""

    address: str
    usable: bool = False
    trouble: str = ""
    starting: bool = False
    unsure: bool = False


class Watch:
    """An `AvailabilityLog` with a clock of its own: what it logs at a time, of some encoders."""

    def __init__(self) -> None:
        self._now = 0.0
        self._availability = AvailabilityLog(patience=15, again=300, clock=lambda: self._now)

    def at(self, seconds: float, *replicas: FakeReplica) -> list[Any]:
        """The warnings."""
        return [line for line in self.all_at(seconds, *replicas) if line["log_level"] == "warning"]

    def all_at(self, seconds: float, *replicas: FakeReplica) -> list[Any]:
        self._now = seconds
        with capture_logs() as lines:
            self._availability.look(replicas)
        return lines

    def said_at(self, seconds: float, *replicas: FakeReplica) -> list[tuple[str, str]]:
        """Events, each with the address that it is about."""
        return [(line["event"], line.get("address", "")) for line in self.all_at(seconds, *replicas)]


def test_an_encoder_has_time_to_start() -> None:
    watch, replica = Watch(), FakeReplica("a:1", trouble="nothing listens there")
    assert not watch.at(0, replica) + watch.at(14, replica)
    (line,) = watch.at(15, replica)
    assert line["log_level"] == "warning"
    assert line["encoders"] == {"a:1": "nothing listens there"}
    assert line["for_seconds"] == 15


def test_an_encoder_that_says_that_it_is_starting_is_there() -> None:
    watch, replica = Watch(), FakeReplica("a:1", starting=True)
    assert not watch.at(0, replica) + watch.at(60, replica)
    replica.starting = False
    assert not watch.at(70, replica) + watch.at(84, replica)
    assert watch.at(85, replica)


def test_it_is_said_again_now_and_then() -> None:
    watch, replica = Watch(), FakeReplica("a:1")
    said = [second for second in range(0, 1000, 5) if watch.at(second, replica)]
    assert said == [15, 315, 615, 915]


def test_one_that_can_be_used_is_enough_and_begins_the_wait_anew() -> None:
    watch, one, other = Watch(), FakeReplica("a:1"), FakeReplica("b:1", usable=True)
    assert not watch.at(0, one) + watch.at(10, one, other) + watch.at(20, one)
    assert not watch.at(34, one)
    assert watch.at(35, one)


def test_one_that_goes_beside_another_is_named_once_and_once_more_when_it_is_back() -> None:
    watch, one, other = Watch(), FakeReplica("a:1", usable=True), FakeReplica("b:1", usable=True)
    assert watch.said_at(0, one, other) == [(USABLE, "a:1"), (USABLE, "b:1")]
    one.usable, one.trouble = False, "nothing listens there"
    (line,) = watch.all_at(2, one, other)
    assert (line["log_level"], line["event"], line["address"]) == ("warning", GONE, "a:1")
    assert line["cause"] == "nothing listens there"
    assert not watch.all_at(4, one, other) + watch.all_at(1000, one, other)
    one.usable = True
    assert watch.said_at(1002, one, other) == [(USABLE, "a:1")]
    assert not watch.all_at(1004, one, other)


def test_one_that_comes_and_goes_is_told_now_and_then() -> None:
    watch, one, other = Watch(), FakeReplica("a:1"), FakeReplica("b:1", usable=True)
    said = {}
    for second in range(0, 700, 2):
        one.usable = second % 4 == 0
        if lines := watch.said_at(second, one, other):
            said[second] = [event for event, _ in lines]
    assert said == {
        0: [USABLE, USABLE],
        **{second: [GONE if second % 4 else USABLE] for second in (2, 4, 302, 304, 602, 604)},
    }


def test_one_that_was_never_there_has_time_to_start_beside_others() -> None:
    watch, one, other = Watch(), FakeReplica("a:1"), FakeReplica("b:1", usable=True)
    assert not watch.at(0, one, other) + watch.at(14, one, other)
    assert watch.said_at(15, one, other) == [(GONE, "a:1")]


@pytest.mark.parametrize("sign", ["unsure", "starting"])
def test_one_that_may_be_there_is_not_gone(sign: str) -> None:
    watch, one, other = Watch(), FakeReplica("a:1", usable=True), FakeReplica("b:1", usable=True)
    watch.all_at(0, one, other)
    one.usable = False
    setattr(one, sign, True)
    assert not watch.all_at(2, one, other)
    setattr(one, sign, False)
    assert watch.said_at(4, one, other) == [(GONE, "a:1")]


def test_where_all_go_one_line_tells_and_one_for_each_that_is_back() -> None:
    watch, one, other = Watch(), FakeReplica("a:1", usable=True), FakeReplica("b:1", usable=True)
    watch.all_at(0, one, other)
    one.usable = other.usable = False
    assert not watch.all_at(2, one, other)
    (line,) = watch.all_at(17, one, other)
    assert set(line["encoders"]) == {"a:1", "b:1"}
    one.usable = True
    assert watch.said_at(20, one, other) == [(USABLE, "a:1")]
    other.usable = True
    assert watch.said_at(40, one, other) == [(USABLE, "b:1")]


def test_one_whose_address_is_no_longer_known_is_forgotten() -> None:
    watch, one, other = Watch(), FakeReplica("a:1", usable=True), FakeReplica("b:1", usable=True)
    watch.all_at(0, one, other)
    assert not watch.all_at(2, other)
    one.usable = False
    assert not watch.all_at(4, one, other)
    assert watch.said_at(19, one, other) == [(GONE, "a:1")]


def test_where_nobody_is_found_the_name_is_in_question() -> None:
    watch = Watch()
    watch.at(0)
    (line,) = watch.at(15)
    assert "--encoders" in line["hint"]


async def test_a_pool_tells_of_an_encoder_that_dies_beside_another_and_why() -> None:
    with capture_logs() as lines:
        async with bench(ScriptedEncoder(), ScriptedEncoder(), resolve_seconds=0.05) as b:

            def said(event: str) -> list[str]:
                return [line["address"] for line in lines if line["event"] == event]

            await eventually(lambda: len(said(USABLE)) == 2)
            await b.encoders[0].server.stop(None)
            await eventually(lambda: said(GONE))
    (line,) = [line for line in lines if line["event"] == GONE]
    assert (line["address"], line["cause"]) == (b.encoders[0].address, "nothing listens there")


async def test_of_an_encoder_that_answers_while_its_streams_break_that_is_told() -> None:
    with capture_logs() as lines:
        async with bench(ScriptedEncoder(), ScriptedEncoder(), resolve_seconds=0.05) as b:
            await eventually(lambda: sum(line["event"] == USABLE for line in lines) == 2)
            breaker = b.pool.replicas[0].breaker

            def is_told() -> bool:
                breaker.failed(breaker.now())
                return any(line["event"] == GONE for line in lines)

            await eventually(is_told)
    (line,) = [line for line in lines if line["event"] == GONE]
    assert line["cause"] == "it answers, but its streams break"


async def test_a_service_without_encoders_says_so_at_once() -> None:
    with capture_logs() as lines:
        pool = EncoderPool([], EncoderSettings(digest="", layout=RowLayout(1, 4, DType.FLOAT32), merge=2))
        await pool.start()
        await pool.stop()
    assert [(line["log_level"], "no encoder is configured" in line["event"]) for line in lines] == [("warning", True)]


@pytest.mark.parametrize(
    ("code", "details", "security", "says"),
    [
        (UNAVAILABLE, "… Connection refused", PLAIN, "nothing listens there"),
        (UNAVAILABLE, "… Socket closed", PLAIN, "--encoder-ca turns TLS on"),
        (UNAVAILABLE, "… Socket closed", ROOTS, "--encoder-cert and --encoder-key"),
        (UNAVAILABLE, "… Socket closed", PAPERS, "may not trust the certificate of --encoder-cert"),
        (UNAVAILABLE, NO_VERSION, ROOTS, "does not speak TLS: without --encoder-ca no TLS is used"),
        (UNAVAILABLE, "CERTIFICATE_VERIFY_FAILED", ROOTS, "--encoder-ca says which roots to trust"),
        (UNAVAILABLE, "Hostname Verification Check failed.", ROOTS, "the host that --encoders names"),
        (UNAVAILABLE, "… getsockopt(SO_ERROR): Connection timed out", PLAIN, "nothing answers there"),
        (UNAVAILABLE, "… in-progress write (ping timeout) (goaway sent)", PLAIN, "nothing answers there"),
        (UNAVAILABLE, "something else", PLAIN, "UNAVAILABLE: something else"),
        (grpc.StatusCode.UNAUTHENTICATED, "", PLAIN, "--encoder-token-file"),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", PLAIN, "it is not an encoder"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", PLAIN, "DEADLINE_EXCEEDED"),
    ],
)
def test_what_is_wrong_is_told_with_the_option_that_helps(
    code: grpc.StatusCode, details: str, security: ChannelSecurity, says: str
) -> None:
    assert says in hint(code, details, security)


@pytest.mark.parametrize(("connects", "pings"), [(True, False), (True, True), (False, False)])
async def test_of_an_address_where_nothing_answers_that_is_told(
    connects: bool, pings: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host behind a firewall that drops packets, or a stopped process. A connection and its first ping have the same
    time limit, here of a second: either may be the first."""
    limits = {"keepalive_time": 400, "keepalive_timeout": 600, "http2.ping_timeout": 600, "min_reconnect_backoff": 1000}
    if pings:
        limits["min_reconnect_backoff"] = 180_000
    options = dict(grpc_channel.OPTIONS) | {f"grpc.{name}_ms": limit for name, limit in limits.items()}
    monkeypatch.setattr(grpc_channel, "OPTIONS", tuple(options.items()))
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        while not connects:  # until the kernel drops what comes, since nobody takes the ones before
            waiting = stack.enter_context(socket.socket())
            waiting.settimeout(0.1)
            try:
                waiting.connect(listening.getsockname())
            except TimeoutError:
                break
        channel = open_channel(f"127.0.0.1:{listening.getsockname()[1]}", PLAIN)
        stub: Any = EncoderServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetInfo(encoder_pb2.EncoderServiceGetInfoRequest(), timeout=180)
        await channel.close()
    said = hint(caught.value.code(), caught.value.details() or "", PLAIN)
    assert said == "nothing answers there, as behind a firewall or on a dead host"
