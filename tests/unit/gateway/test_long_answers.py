"""A request whose answer gets on has time for more of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from gateway.config import GatewayConfig
from gateway.connection import ABORT
from gateway.meters import Meters
from gateway.middleware import RequestMiddleware
from gateway.request_context import SCOPE_KEY, RequestContext
from tests.clock import Forward, turns

CONFIG = GatewayConfig(listen="127.0.0.1:0", llm=("127.0.0.1:1",), request_seconds=100, answer_seconds=1000)


class Answering:
    """A request that is answered until a test says that it is over."""

    def __init__(self) -> None:
        self._over = asyncio.Event()
        self.status = 0
        self.context: RequestContext | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.context = scope[SCOPE_KEY]
        await self._over.wait()

    async def send(self, message: Any) -> None:
        self.status = message.get("status", self.status)

    async def begin(self) -> asyncio.Task[None]:
        """Returns when the request is under way."""
        scope = {"type": "http", "method": "POST", "path": "/v1/x", "headers": [], "extensions": {ABORT: lambda: None}}
        parts: asyncio.Queue[Any] = asyncio.Queue()
        parts.put_nowait({"type": "http.request", "body": b"{}"})
        serving = asyncio.create_task(RequestMiddleware(self, CONFIG, Meters())(scope, parts.get, self.send))
        await turns(9)
        return serving

    def token(self) -> None:
        assert self.context is not None
        self.context.gets_on()


@pytest.mark.parametrize("tokens", [0, 1, 5])
async def test_an_answer_that_stops_is_ended_and_one_that_gets_on_is_not(forward: Forward, tokens: int) -> None:
    answering = Answering()
    serving = await answering.begin()
    for _ in range(tokens):
        forward(90)
        await turns(9)
        assert not serving.done()
        answering.token()
    forward(90)
    await turns(9)
    assert not serving.done()
    forward(11)
    await serving
    assert answering.status == 504


async def test_no_answer_gets_on_for_ever(forward: Forward) -> None:
    answering = Answering()
    serving = await answering.begin()
    for _ in range(19):
        forward(50)
        await turns(9)
        answering.token()
    assert not serving.done()
    for _ in range(2):
        forward(50)
        await turns(9)
        answering.token()
    await serving
    assert answering.status == 504
