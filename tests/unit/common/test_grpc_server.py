"""What health checks say of a server, what its owner reported last; and how calls end with it."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc._cython import cygrpc  # type: ignore[attr-defined]
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.rpc.channel import from_rpc_error
from common.rpc.server import GrpcServer, ServerConfig
from tests.launch import launch
from tests.unit.common.plain_service import STANDS_STILL
from tests.waiting import eventually, until
from twinlens import v1

NAME = "twinlens.v1.LlmService"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def frame() -> AsyncIterator[GrpcServer]:
    frame = GrpcServer(ServerConfig(grace_seconds=0), [NAME])
    await frame.bind()
    yield frame
    await frame.drain()


async def health(frame: GrpcServer) -> set[int]:
    """What it says of the server and of the service."""
    async with grpc.aio.insecure_channel(frame.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return {(await stub.Check(health_pb2.HealthCheckRequest(service=name))).status for name in ("", NAME)}


async def test_a_server_serves_once_it_is_announced(frame: GrpcServer) -> None:
    assert await health(frame) == {NOT_SERVING}
    frame.report(True)
    assert await health(frame) == {NOT_SERVING}
    await frame.announce()
    assert await health(frame) == {SERVING}


async def test_what_has_gone_before_the_announcement_is_not_announced(frame: GrpcServer) -> None:
    """An engine that was ready, and died before anybody was told."""
    frame.report(True)
    frame.report(False)
    await frame.announce()
    assert await health(frame) == {NOT_SERVING}
    frame.report(True)
    assert await health(frame) == {SERVING}


async def test_the_last_report_holds_though_another_is_still_being_told(frame: GrpcServer) -> None:
    announcing = asyncio.create_task(frame.announce())
    frame.report(False)
    await announcing
    frame.report(True)
    frame.report(False)
    assert await health(frame) == {NOT_SERVING}


class Lasting(v1.LlmServiceServicer):
    """Calls that end when they are ended: one in the middle of its stream, one before its answer."""

    def __init__(self) -> None:
        self.begun = 0
        self.given_back: list[str] = []

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[v1.GenerateResponse]:
        yield v1.GenerateResponse(started=v1.GenerateStarted(request_id=request.request_id))
        await self._last("Generate")

    async def Tokenize(self, request: Any, context: Any) -> v1.TokenizeResponse:
        await self._last("Tokenize")
        return v1.TokenizeResponse()

    async def _last(self, name: str) -> None:
        self.begun += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.given_back.append(name)


async def test_a_call_that_outlives_the_grace_time_is_told_why_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    server, lasting = GrpcServer(ServerConfig(grace_seconds=0), [NAME]), Lasting()
    v1.add_LlmServiceServicer_to_server(lasting, server.server)
    await server.bind()
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = v1.LlmServiceStub(channel)
        stream, answer = stub.Generate(v1.GenerateRequest()), stub.Tokenize(v1.TokenizeRequest(text="x"))
        await stream.read()
        await eventually(lambda: lasting.begun == 2, "both are under way")
        await server.drain()
        for call in (stream.read(), answer):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
            told = from_rpc_error(raised.value)
            assert (told.reason, told.retry_after) == ("CALL_ENDED", 1.0)
    assert sorted(lasting.given_back) == ["Generate", "Tokenize"]
    said = capsys.readouterr().out
    assert (said.count("outcome=CALL_ENDED"), said.count("CANCELLED")) == (2, 0)
    assert "ending calls" in said


def fingerprint(address: str) -> str:
    """The certificate that a server shows now."""
    host, _, port = address.rpartition(":")
    return ssl.get_server_certificate((host, int(port)))


async def test_a_certificate_that_is_replaced_is_shown_from_then_on(tmp_path: Path) -> None:
    """A connection that is there goes on; one that comes later is shown the new certificate, by another authority."""
    cert, key, ca = (tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem"))

    def issue() -> bytes:
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1")
        cert.write_bytes(issued.cert_chain_pems[0].bytes())
        issued.private_key_pem.write_to_path(str(key))
        authority.cert_pem.write_to_path(str(ca))
        return authority.cert_pem.bytes()

    def channel(roots: bytes) -> grpc.aio.Channel:
        shown = grpc.ssl_channel_credentials(roots, key.read_bytes(), cert.read_bytes())
        return grpc.aio.secure_channel(frame.address, shown, options=[("grpc.use_local_subchannel_pool", 1)])

    old = issue()
    config = ServerConfig(grace_seconds=0, tls_cert=str(cert), tls_key=str(key), tls_client_ca=str(ca))
    frame = GrpcServer(config, [NAME])
    await frame.bind()
    try:
        async with channel(old) as before:
            asked = health_pb2_grpc.HealthStub(before)
            await asked.Check(health_pb2.HealthCheckRequest(), timeout=180)
            shown_to_strangers = await asyncio.to_thread(fingerprint, frame.address)
            new = issue()
            async with channel(new) as after:
                await health_pb2_grpc.HealthStub(after).Check(health_pb2.HealthCheckRequest(), timeout=180)
            await asked.Check(health_pb2.HealthCheckRequest(), timeout=180)
            assert await asyncio.to_thread(fingerprint, frame.address) != shown_to_strangers
            async with channel(old) as late:
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await health_pb2_grpc.HealthStub(late).Check(health_pb2.HealthCheckRequest(), timeout=180)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await frame.drain()


@pytest.mark.soak
def test_calls_that_come_while_a_service_stands_still_are_answered_when_it_goes_on() -> None:
    """By itself gRPC cancels, without a word, what nobody has taken for half a minute."""
    with launch("tests.unit.common.plain_service") as running, grpc.insecure_channel(running.address) as channel:
        ask = v1.LlmServiceStub(channel).Tokenize.future
        asked = [ask(v1.TokenizeRequest(text=STANDS_STILL), timeout=180)]
        until(lambda: STANDS_STILL in running.log.read_text(), "it stands still")
        asked += [ask(v1.TokenizeRequest(text="x" * n), timeout=180) for n in range(1, 9)]
        assert [list(each.result().ids) for each in asked] == [[len(STANDS_STILL)], *([n] for n in range(1, 9))]


class Raising(grpc.GenericRpcHandler):
    """Whose only method raises what its caller asks for, outside of our frame."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    def service(self, handler_call_details: Any) -> Any:
        async def serve(request: bytes, _context: Any) -> bytes:
            self.asked.append(request)
            raise cygrpc.ExecuteBatchError("late") if request == b"late" else ValueError("defect")

        return grpc.unary_unary_rpc_method_handler(serve, request_deserializer=bytes)


async def test_a_caller_who_leaves_as_the_last_words_are_sent_is_no_error_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    frame = GrpcServer(ServerConfig(grace_seconds=0), [NAME])
    frame.server.add_generic_rpc_handlers([raising := Raising()])
    await frame.bind()
    async with grpc.aio.insecure_channel(frame.address) as channel:
        ask: Any = channel.unary_unary("/other.Service/Ask")
        late = ask(b"late")
        await eventually(lambda: raising.asked, "it is there")
        with pytest.raises(grpc.aio.AioRpcError):
            await ask(b"defect")
        late.cancel()
    await frame.drain()
    errors = [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]
    assert errors == ["Unexpected [ValueError] raised by servicer method [/other.Service/Ask]"]
