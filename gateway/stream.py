"""Answers: a JSON object, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any, Final

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.aio import tasks

DONE: Final = b"data: [DONE]\n\n"
"""How a stream of OpenAI's ends that has come to its end."""

SILENCE: Final = 15.0
"""Seconds without an event after which a stream sends a comment: much of an answer may be a call or hidden reasoning,
and proxies drop silent connections."""
_COMMENT: Final = b": still here\n\n"

EVENTS: Final = "text/event-stream"

_LINE_ENDS: Final = tuple((sign.encode(), b"\\u%04x" % ord(sign)) for sign in "\u2028\u2029\x85")


def json_answer(content: dict[str, Any]) -> Response:
    """A whole answer."""
    return Response(to_json(content), media_type="application/json")


def list_answer(content: dict[str, Any], field: str, elements: Iterable[bytes]) -> Response:
    """A whole response with one more field: a list of elements that are JSON already, serialised one by one."""
    listed = b',"%s":[%s]}' % (field.encode(), b",".join(elements))
    return Response(to_json(content)[:-1] + listed, media_type="application/json")


def event(content: dict[str, Any], name: str = "") -> bytes:
    """One event."""
    named = f"event: {name}\n".encode() if name else b""
    return b"%sdata: %s\n\n" % (named, _in_one_line(to_json(content)))


def _in_one_line(content: bytes) -> bytes:
    """JSON without signs that some readers of lines, though no reader of events, take for line ends.

    >>> _in_one_line(to_json("a\u2028b\x85"))
    b'"a\\\\u2028b\\\\u0085"'
    """
    if content.isascii():
        return content
    for sign, escaped in _LINE_ENDS:
        content = content.replace(sign, escaped)
    return content


class Chunks:
    """Makes the chunks of one answer, which all begin alike: that part is written as JSON once.

    >>> Chunks({"id": "a", "created": 0}).chunk({"choices": []})
    b'data: {"id":"a","created":0,"choices":[]}\\n\\n'
    """

    def __init__(self, head: dict[str, Any]) -> None:
        self._head = b"data: " + _in_one_line(to_json(head))[:-1] + b","

    def chunk(self, rest: dict[str, Any]) -> bytes:
        """One event: the head, and the rest, which is not empty."""
        return self._head + _in_one_line(to_json(rest))[1:] + b"\n\n"


class Last(bytes):
    """The last events of a stream, which go out with its end: sending is most of the cost of a short part."""


class EventStream(Response):
    """A stream of events. The first is awaited, since an error before it is an ordinary response."""

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        super().__init__(media_type=EVENTS, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Sends them; the source is closed on every way out."""
        loop = asyncio.get_running_loop()
        sent = loop.time()

        async def break_silence() -> None:
            nonlocal sent
            while True:
                await asyncio.sleep(max(0.0, sent + SILENCE - loop.time()))
                if loop.time() - sent >= SILENCE:
                    sent = loop.time()
                    await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})

        speaking: asyncio.Task[None] | None = None
        try:
            async with aclosing(self._events) as events:
                async for each in events:
                    sent = loop.time()
                    if speaking is None:
                        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                        speaking = tasks.start(break_silence(), "break a stream's silence")
                    if isinstance(each, Last):
                        speaking.cancel()
                        await send({"type": "http.response.body", "body": each})
                        return
                    await send({"type": "http.response.body", "body": each, "more_body": True})
        finally:
            if speaking is not None:
                speaking.cancel()
        await send({"type": "http.response.body", "body": b""})
