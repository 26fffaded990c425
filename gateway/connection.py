"""One HTTP connection, with the bounds that uvicorn leaves to a proxy: on the time and the size of a request's head, on
what is left of a body once its answer is out, and on the number of connections."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_HEAD_BYTES = 64 << 10
"""The largest request line with its headers."""

ABORT = "twinlens.abort"
"""The extension of a request's scope that closes its connection without waiting for the caller to read on."""


class Connection(HttpToolsProtocol):
    """A connection that may not hold its place without a request that gets on."""

    head_seconds = 10.0
    most = 2048

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._head = 0
        self._in_head = True
        self._in_body = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes a place, or has none."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.abort()
            return
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads on, as long as a head is no longer than it may be."""
        self._head = self._head + len(data) if self._in_head else 0
        super().data_received(data)
        if self._in_head and self._head > _HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request's head is too long.")

    def on_message_begin(self) -> None:
        """The first byte of a request: its head has to come in time."""
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: self.transport.abort}  # type: ignore[dict-item]
        self._in_head = True
        self._wait()

    def on_headers_complete(self) -> None:
        """Whoever answers the request bounds the time of its body."""
        self._in_head, self._in_body, self._head = False, True, 0
        self._stop_waiting()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The whole request is here."""
        self._in_head, self._in_body = True, False
        self._stop_waiting()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer is out; of a body that nobody reads, the rest may come for as long as a head."""
        super().on_response_complete()
        if self._in_body:
            self._wait()

    def _wait(self) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(self.head_seconds, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
