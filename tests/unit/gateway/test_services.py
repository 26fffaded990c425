"""What a gateway makes of what an LLM service says of itself, or does not."""

from __future__ import annotations

import grpc
import pytest

from gateway.services import LlmService
from twinlens.v1 import llm_pb2


class Stub:
    """It answers once; then its gRPC fails with this code and these details."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._failure = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
        self._fails = False

    async def GetInfo(self, *_given: object, **_more: object) -> llm_pb2.LlmServiceGetInfoResponse:
        if self._fails:
            raise self._failure
        self._fails = True
        return llm_pb2.LlmServiceGetInfoResponse(model="m", context_tokens=1)

    async def GetLoad(self, *_given: object, **_more: object) -> llm_pb2.LlmServiceGetLoadResponse:
        return llm_pb2.LlmServiceGetLoadResponse()


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
    service = LlmService("here", "", None, Stub(code, details), None)  # type: ignore[arg-type]
    await service.look(())
    assert service.info is not None
    await service.look(())
    assert (service.info is not None) is usable
