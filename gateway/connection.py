"""One HTTP connection, with bounds that uvicorn leaves to a proxy: on the time and size of a request's head, on the
rest of a body after its response, on how long the end of a response may wait for a client that reads nothing, and on
the number of connections. It also handles HTTP/1.0 clients, upgrade requests, and clients that speak another
protocol."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from common.aio.tasks import StallTolerantTimer
from common.errors import InvalidInput
from gateway.errors import body_of, headers_of

_HEAD_BYTES = 64 << 10
"""The largest request line with its headers."""

ABORT = "twinlens.abort"
"""The extension of a request's scope that closes its connection without waiting for the caller to read on."""


class Connection(HttpToolsProtocol):
    """A connection that may not hold its place without a request that gets on."""

    head_seconds = 10.0
    answer_seconds = 30.0
    max_connections = 2048

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: StallTolerantTimer | None = None
        self._sending: StallTolerantTimer | None = None
        self._head = 0
        self._in_head = True
        self._in_body = False
        self._last = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes a place, or has none."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
            return
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._stop_waiting()
        self._stop_looking()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads on, as long as a head is no longer than it may be."""
        self._head = self._head + len(data) if self._in_head else 0
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("this is not an HTTP request")
            return
        if self._in_head and self._head > _HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("the request's head is too long")

    def _parse(self, data: bytes) -> None:
        """Parses data. Upgrades are not supported, so a request for one is parsed again without it.

        Java's HttpClient asks for one in every request, and the parser treats what follows such a head as the other
        protocol.
        """
        while True:
            try:
                return self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as wish:
                if not self._should_upgrade():
                    raise httptools.HttpParserError("CONNECT") from None
                data = self._head_without_wish() + data[wish.args[0] :]
                self.parser = httptools.HttpRequestParser(self)

    def _should_upgrade(self) -> bool:
        """The head is parsed again; nothing has been started for it before."""
        return self.scope["method"] != "CONNECT"

    def _head_without_wish(self) -> bytes:
        version = self.scope["http_version"].encode()
        lines = [b"%s %s HTTP/%s" % (self.scope["method"].encode(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join((*lines, b"", b""))

    def send_400_response(self, msg: str) -> None:
        """Sends an error and closes the connection; in the middle of a response it only closes."""
        cycle: RequestResponseCycle | None = self.cycle
        answering = cycle is not None and cycle.response_started and not cycle.response_complete
        if not answering and not self.pipeline:
            error = InvalidInput(msg, reason="BAD_HTTP")
            content = body_of(error)
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
            headers += [*headers_of(error), (b"connection", b"close")]
            lines = (b"HTTP/1.1 400 Bad Request", *(b"%s: %s" % header for header in headers), b"", content)
            self.transport.write(b"\r\n".join(lines))
        self.transport.close()

    def on_message_begin(self) -> None:
        """The first byte of a request: its head has to come in time."""
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: self.transport.abort}  # type: ignore[dict-item]
        self._in_head = True
        self._wait()

    def on_headers_complete(self) -> None:
        """From here on the handler bounds the time of the body."""
        self._in_head, self._in_body, self._head = False, True, 0
        self._stop_waiting()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The whole request is here."""
        self._in_head, self._in_body = True, False
        self._stop_waiting()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The response is written; the rest of an unread body may take as long as a head."""
        self._look_again()  # before the next request, which has a timer of its own
        super().on_response_complete()
        if self._in_body:
            self._wait()

    def shutdown(self) -> None:
        """The request under way is the last one here; a connection without one stays for its last, until `hang_up`.

        A proxy that finds a connection closed under a request that it has sent may not send it to another gateway.
        """
        self._last = True
        if not self._idle:
            self.cycle.keep_alive = False

    def hang_up(self) -> None:
        """Closes a connection without a request."""
        if self._idle:
            self.transport.close()

    @property
    def _idle(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None or bool(cycle.response_complete)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._stop_looking()
        cycle.keep_alive = cycle.keep_alive and not self._last
        if cycle.scope["http_version"] == "1.0":
            app = _until_closed(app, cycle)
        super()._start_asgi_task(cycle, app)

    def _wait(self) -> None:
        self._stop_waiting()
        self._timer = StallTolerantTimer(self.head_seconds, self.transport.abort)

    def _look_again(self) -> None:
        """Checks later whether the client has read any of the rest of its response."""
        self._stop_looking()
        if left := self.transport.get_write_buffer_size():
            self._sending = StallTolerantTimer(self.answer_seconds, lambda: self._look(left))

    def _look(self, before: int) -> None:
        if self.transport.get_write_buffer_size() < before:
            self._look_again()
        else:  # to close it would wait for him
            self.transport.abort()

    def _stop_looking(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _until_closed(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """HTTP/1.0 clients know no chunks: a response without a length ends with the connection."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def unframed(message: Message) -> None:
            if message["type"] == "http.response.start":
                if not any(name == b"content-length" for name, _ in message["headers"]):
                    cycle.chunked_encoding = False
            elif cycle.expected_content_length == 0:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, unframed)

    return serve
