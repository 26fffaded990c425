"""What a gateway makes of what an LLM service says of itself, or does not."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from common.errors import Exhausted, TwinlensError, Unavailable
from gateway.services import LlmService, error_of
from tests.unit.gateway.test_closed_channels import Holding, generate, held
from tests.waiting import eventually
from twinlens.v1 import llm_pb2, media_pb2


class Stub:
    """It answers once; then it, or its gRPC, fails with this code, these details and this status."""

    def __init__(self, code: grpc.StatusCode, details: str, status: bytes = b"") -> None:
        trailers = grpc.aio.Metadata(("twinlens-status-bin", status))
        self._failure = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, details)
        self._fails = False

    async def GetInfo(self, *_given: object, **_more: object) -> llm_pb2.LlmServiceGetInfoResponse:
        if self._fails:
            raise self._failure
        self._fails = True
        return llm_pb2.LlmServiceGetInfoResponse(model="m", context_tokens=1)

    async def GetLoad(self, *_given: object, **_more: object) -> llm_pb2.LlmServiceGetLoadResponse:
        return llm_pb2.LlmServiceGetLoadResponse()


class Channels:
    """They are there."""

    def connect(self) -> None:
        pass

    async def connected(self) -> None:
        pass


def service_of(stub: Any) -> LlmService:
    """A service that is asked how it is by this stub."""
    link: Any = SimpleNamespace(about=stub, connections=Channels())
    return LlmService("here", "", link)


async def test_a_service_is_asked_how_it_is_beside_calls_that_fill_their_connection() -> None:
    words: list[Any] = []
    async with held([Holding()], options=(("grpc.max_concurrent_streams", 1),)) as known:
        asking = asyncio.create_task(generate(known, words))
        await eventually(lambda: len(words) == 2, "it has begun")
        (service,) = known.services
        assert await known.confirm(service)
        assert service.in_flight == 1
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


@pytest.mark.parametrize(
    ("code", "details", "usable"),
    [
        (grpc.StatusCode.CANCELLED, "CANCELLED", True),
        (grpc.StatusCode.UNAVAILABLE, "Received RST_STREAM with error code 7", True),
        (grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses", False),
    ],
)
async def test_a_service_whose_grpc_takes_no_more_calls_is_there(
    code: grpc.StatusCode, details: str, usable: bool
) -> None:
    service = service_of(Stub(code, details))
    await service.look(())
    assert service.info is not None
    await service.look(())
    assert (service.info is not None) is usable


@pytest.mark.parametrize(
    ("begun", "kind", "reason"), [(False, Exhausted, "TOO_MANY_CALLS"), (True, Unavailable, "STREAM_INTERRUPTED")]
)
def test_a_call_that_grpc_does_not_take_is_one_too_many(begun: bool, kind: type[TwinlensError], reason: str) -> None:
    details = "Received RST_STREAM with error code 7"
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
    told = error_of(error, begun=begun)
    assert (type(told), told.reason, told.retry_after) == (kind, reason, 1.0)


async def test_a_service_that_says_that_it_has_too_many_calls_is_there() -> None:
    status = media_pb2.Status(code=8, message="too many calls are being served", reason="TOO_MANY_CALLS")
    stub = Stub(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls are being served", status.SerializeToString())
    service = service_of(stub)
    for _ in range(40):
        await service.look(())
        assert service.info is not None


async def test_the_log_tells_a_service_that_stops_from_one_that_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    status = media_pb2.Status(code=14, message="the service stops", reason="STOPPING")
    service = service_of(Stub(grpc.StatusCode.UNAVAILABLE, "the service stops", status.SerializeToString()))
    await service.look(())
    await service.look(())
    assert service.info is None
    assert capsys.readouterr().out.count("cause=STOPPING") == 1


async def test_a_service_whose_every_call_is_reset_is_gone_in_the_end() -> None:
    stub = Stub(grpc.StatusCode.UNAVAILABLE, "Received RST_STREAM with error code 7")
    service = service_of(stub)
    for _ in range(30):
        await service.look(())
        assert service.info is not None
    await service.look(())
    assert service.info is None


async def test_at_a_service_that_has_no_engine_and_does_not_say_what_it_is_no_request_waits() -> None:
    status = media_pb2.Status(code=14, reason="ENGINE_UNAVAILABLE").SerializeToString()
    stub = Stub(grpc.StatusCode.UNAVAILABLE, "the engine is starting", status)
    service = service_of(stub)
    await service.look(())
    await service.look(())
    assert service.info is None
    assert service.between is None
