from __future__ import annotations

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.grpc_channel import ChannelSecurity, open_channel
from common.grpc_server import GrpcServer, ServerConfig


async def test_the_link_goes_through_no_proxy_whatever_the_environment_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers are often given one for their downloads; it knows nothing of an encoder's address."""
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    frame = GrpcServer(ServerConfig(), [])
    await frame.bind()
    try:
        async with open_channel(frame.address, ChannelSecurity()) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    finally:
        await frame.drain()
