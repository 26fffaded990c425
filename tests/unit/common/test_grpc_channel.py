from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.rpc.channel import ChannelSecurity, open_channel
from common.rpc.server import GrpcServer, ServerConfig


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


@contextmanager
def slow_to_answer(target: str, seconds: float) -> Iterator[str]:
    """An address in front of another, where each connection is taken at once, and read from so many seconds later: as
    of a process that waits for a core."""
    host, _, port = target.rpartition(":")
    over, ends, threads = threading.Event(), list[socket.socket](), list[threading.Thread]()

    def run(work: Callable[..., None], *given: socket.socket) -> None:
        threads.append(threading.Thread(target=work, args=given))
        threads[-1].start()

    def accept() -> None:
        with suppress(OSError):
            while True:
                near, far = listening.accept()[0], socket.create_connection((host, int(port)))
                ends.extend((near, far))
                run(carry, near, far)
                run(carry, far, near)

    def carry(source: socket.socket, sink: socket.socket) -> None:
        over.wait(seconds)
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        run(accept)
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            over.set()
            listening.shutdown(socket.SHUT_RDWR)
            threads[0].join()  # no more of them come
            for end in ends:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
            for end in ends:
                end.close()


async def test_a_service_that_takes_a_while_to_answer_a_connection_is_there() -> None:
    frame = GrpcServer(ServerConfig(), [])
    await frame.bind()
    try:
        with slow_to_answer(frame.address, 1.5) as address:
            async with open_channel(address, ChannelSecurity()) as channel:
                answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=180)
                assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    finally:
        await frame.drain()
