"""A stream in which nothing is said for long tells that it is still there, by lines that clients pass over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.types import Message

from gateway.stream import DONE, SILENCE, EventStream, Last, event
from tests.clock import Forward, turns


class Streaming:
    """A stream whose events come from `events`, and what is sent of it."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[bytes] = asyncio.Queue()
        self.sent: list[bytes] = []
        self.serving = asyncio.create_task(EventStream(self._source())({}, self._receive, self._send))

    async def _source(self) -> AsyncGenerator[bytes]:
        while True:
            yield (each := await self.events.get())
            if isinstance(each, Last):
                return

    async def _receive(self) -> Message:
        raise AssertionError("nothing is read")

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self.sent.append(message["body"])

    async def say(self, each: bytes) -> None:
        self.events.put_nowait(each)
        await turns(5)


async def test_a_stream_in_which_nothing_is_said_has_comments(forward: Forward) -> None:
    streaming = Streaming()
    await turns(5)
    forward(2 * SILENCE)
    await turns(5)
    assert streaming.sent == [], "before the first event an error has a status of its own"
    await streaming.say(event({"a": 1}))
    for _ in range(2):
        forward(SILENCE)
        await turns(5)
    comments = streaming.sent[1:]
    assert len(comments) == 2
    assert all(each.startswith(b":") and each.endswith(b"\n\n") for each in comments)
    forward(SILENCE - 1)
    await streaming.say(event({"a": 2}))
    forward(SILENCE - 1)
    await turns(5)
    assert streaming.sent[3:] == [event({"a": 2})], "silence begins anew"
    await streaming.say(Last(DONE))
    await streaming.serving
    forward(2 * SILENCE)
    await turns(5)
    assert streaming.sent[4:] == [DONE], "nothing stands behind the end"
