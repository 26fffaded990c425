"""A gateway whose event loop stood still reads what came meanwhile before it gives a caller up."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from gateway.config import GatewayConfig
from gateway.connection import ABORT, Connection
from gateway.meters import Meters
from gateway.middleware import RequestMiddleware
from tests.clock import Forward, turns

CONFIG = GatewayConfig(
    listen="127.0.0.1:0", llm=("127.0.0.1:1",), request_stall_seconds=10, answer_stall_seconds=10, request_seconds=9999
)


class Call:
    """One request as the server below the middleware has it: what it hands in comes from `parts`, and `taken` says
    when a part of the answer has been."""

    def __init__(self) -> None:
        self.parts: asyncio.Queue[Message] = asyncio.Queue()
        self.taken = asyncio.Event()
        self.taken.set()
        self.answer: list[Message] = []
        self.aborted = False

    async def send(self, message: Message) -> None:
        self.answer.append(message)
        await self.taken.wait()

    def _abort(self) -> None:
        self.aborted = True

    async def through(self, middleware: RequestMiddleware) -> None:
        scope = {"type": "http", "method": "POST", "path": "/v1/x", "headers": [], "extensions": {ABORT: self._abort}}
        await middleware(scope, self.parts.get, self.send)

    def part(self, body: bytes, *, more: bool) -> None:
        self.parts.put_nowait({"type": "http.request", "body": body, "more_body": more})

    @property
    def said(self) -> Any:
        return json.loads(b"".join(each.get("body", b"") for each in self.answer))


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Two parts of an answer."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b'{"an', "more_body": True})
    await send({"type": "http.response.body", "body": b'swer": 1}'})


@pytest.fixture
def middleware() -> RequestMiddleware:
    return RequestMiddleware(echo, CONFIG, Meters())


async def test_a_body_that_came_meanwhile_is_read(middleware: RequestMiddleware, forward: Forward) -> None:
    call = Call()
    call.part(b"{", more=True)
    serving = asyncio.create_task(call.through(middleware))
    await turns(9)
    forward(500)
    await turns(1)
    call.part(b"}", more=False)
    await serving
    assert call.said == {"answer": 1}


async def test_a_body_of_which_nothing_came_is_given_up(middleware: RequestMiddleware, forward: Forward) -> None:
    call = Call()
    call.part(b"{", more=True)
    serving = asyncio.create_task(call.through(middleware))
    await turns(9)
    forward(500)
    await turns(9)
    assert call.answer == []
    forward(5)
    await serving
    assert call.said["error"]["code"] == "REQUEST_TOO_SLOW"


async def answering(middleware: RequestMiddleware) -> tuple[Call, asyncio.Task[None]]:
    """A call whose caller does not take the first part of its answer."""
    call = Call()
    call.part(b"{}", more=False)
    call.taken.clear()
    serving = asyncio.create_task(call.through(middleware))
    while not call.answer:
        await turns(1)
    return call, serving


async def test_a_caller_who_has_read_meanwhile_is_not_given_up(middleware: RequestMiddleware, forward: Forward) -> None:
    call, serving = await answering(middleware)
    forward(500)
    await turns(1)
    call.taken.set()
    await serving
    assert call.said == {"answer": 1}
    assert not call.aborted


async def test_a_caller_who_takes_nothing_is_given_up(middleware: RequestMiddleware, forward: Forward) -> None:
    call, serving = await answering(middleware)
    forward(500)
    await turns(9)
    assert not call.aborted
    forward(5)
    await serving
    assert call.aborted


class Transport(asyncio.Transport):
    """A connection on which nothing has come yet, and nothing written to it goes out but what a test says."""

    aborted = False
    unsent = 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    def abort(self) -> None:
        self.aborted = True

    def write(self, data: Any) -> None:
        self.unsent += len(data)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.aborted


def connected() -> tuple[Connection, Transport]:
    config = uvicorn.Config(echo, http=Connection, lifespan="off", log_config=None)
    config.load()
    connection, transport = Connection(config, uvicorn.server.ServerState(), {}), Transport()
    connection.connection_made(transport)
    return connection, transport


async def test_a_connection_is_not_given_up_before_what_came_meanwhile_is_read(forward: Forward) -> None:
    _, transport = connected()
    forward(500)
    await turns(9)
    assert not transport.aborted
    forward(5)
    await turns()
    assert transport.aborted


async def test_who_takes_some_of_what_is_left_of_an_answer_is_given_up_once_he_takes_nothing(forward: Forward) -> None:
    connection, transport = connected()
    connection.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    await turns(9)
    assert transport.unsent > 2
    for _ in range(2):
        transport.unsent -= 1
        forward(Connection.answer_seconds + 0.01)
        await turns()
        assert not transport.aborted
    forward(Connection.answer_seconds + 0.01)
    await turns()
    assert transport.aborted


async def test_an_answer_that_is_out_leaves_its_connection_as_it_is(forward: Forward) -> None:
    connection, transport = connected()
    connection.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    await turns(9)
    transport.unsent = 0
    forward(Connection.answer_seconds + 0.01)
    await turns()
    assert not transport.aborted


async def test_a_further_answer_begins_the_look_at_what_is_left_anew(forward: Forward) -> None:
    connection, transport = connected()
    connection.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    await turns(9)
    forward(Connection.answer_seconds - 1)
    connection.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    await turns(9)
    forward(Connection.answer_seconds - 1)
    await turns()
    assert not transport.aborted
    forward(1.01)
    await turns()
    assert transport.aborted
