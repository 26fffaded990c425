"""What health checks say of a server: what its owner reported last, whenever that was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.grpc_server import GrpcServer, ServerConfig

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
