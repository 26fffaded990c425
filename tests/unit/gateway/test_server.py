"""What the gateway does with connections that come while it stops."""

from __future__ import annotations

import asyncio
import socket

from gateway.config import GatewayConfig
from gateway.meters import Meters
from gateway.middleware import RequestMiddleware
from gateway.server import _listen, _Server
from gateway.stream import json_answer


def test_a_connection_that_was_never_accepted_is_answered_by_a_gateway_that_stops() -> None:
    config = GatewayConfig(listen="127.0.0.1:0", llm=("127.0.0.1:1",))

    async def stop() -> bytes:
        server = _Server(config, RequestMiddleware(json_answer({"status": "ok"}), config, Meters()))
        listening = _listen(config.listen)
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup([listening])
        with socket.create_connection(listening.getsockname(), timeout=180) as caller:
            caller.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")  # the event loop has seen none of it
            await server.shutdown([listening])
            return caller.recv(4096)

    answer = asyncio.run(stop())
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"connection: close\r\n" in answer
