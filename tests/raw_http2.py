"""A gRPC caller made by hand: HTTP/2 frames on a socket, so that it can do what no gRPC library does.

It announces messages and falls silent, cuts them into frames of a byte, and answers pings all the while.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
_INITIAL_WINDOW = 4
_WINDOW = 65_535
_FRAME = 16_384


class RawConnection:
    """One connection, its calls, and how many bytes of each the other side still takes."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._address = address
        self._unread = b""
        self._unsent = b""
        self._initial = _WINDOW
        self._next = 1
        self.window = _WINDOW
        self.windows: dict[int, int] = {}
        self.trailers: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self.closed = False
        self._socket.setblocking(False)
        self._put(PREFACE + frame(SETTINGS))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def call(self, path: str) -> int:
        """Begins a call; its stream."""
        stream, self._next = self._next, self._next + 2
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": self._address,
            "te": "trailers",
            "content-type": "application/grpc",
        }
        self.windows[stream] = self._initial
        self._put(frame(HEADERS, END_HEADERS, stream, b"".join(_field(*each) for each in fields.items())))
        return stream

    def send(self, stream: int, data: bytes, *, end: bool = False, piece: int = _FRAME, seconds: float = 180.0) -> int:
        """Sends as much of `data` as the windows allow within this time, unless the call ends first; how much it is."""
        sent, until = 0, time.monotonic() + seconds
        while sent < len(data) and stream not in self.ended and not self.closed and time.monotonic() < until:
            room = min(self.window, self.windows[stream], len(data) - sent)
            if room <= 0 or len(self._unsent) > 1 << 20:
                self.listen(0.05)
                continue
            take = min(room, 1 << 18)
            cut = data[sent : sent + take]
            self._put(b"".join(frame(DATA, 0, stream, cut[at : at + piece]) for at in range(0, take, piece)))
            sent += take
            self.window -= take
            self.windows[stream] -= take
            self.listen(0)
        if end and sent == len(data) and stream not in self.ended:
            self._put(frame(DATA, END_STREAM, stream))
        return sent

    def listen(self, seconds: float) -> None:
        """Takes in what comes for this time, or until something has come, and answers pings and settings."""
        try:
            self._listen(seconds)
        except OSError:
            self.closed = True

    def until_ended(self, stream: int, seconds: float = 180.0) -> bool:
        """Answers pings until the call has ended; False where it does not within this time."""
        until = time.monotonic() + seconds
        while stream not in self.ended and not self.closed and time.monotonic() < until:
            self.listen(0.1)
        return stream in self.ended or self.closed

    def _listen(self, seconds: float) -> None:
        wanted = [self._socket] if self._unsent else []
        readable, writable, _ = select.select([self._socket], wanted, [], seconds)
        if writable:
            self._put(b"")
        if not readable:
            return
        got = self._socket.recv(1 << 18)
        self.closed = self.closed or not got
        self._unread += got
        while len(self._unread) >= 9:
            length = int.from_bytes(self._unread[:3], "big")
            if len(self._unread) < 9 + length:
                return
            kind, flags, stream = struct.unpack(">BBI", self._unread[3:9])
            body, self._unread = self._unread[9 : 9 + length], self._unread[9 + length :]
            self._take(kind, flags, stream, body)

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == PING and not flags & ACK:
            self._put(frame(PING, ACK, 0, body))
        elif kind == SETTINGS and not flags & ACK:
            for at in range(0, len(body), 6):
                name, value = struct.unpack(">HI", body[at : at + 6])
                if name == _INITIAL_WINDOW:
                    for each in self.windows:
                        self.windows[each] += value - self._initial
                    self._initial = value
            self._put(frame(SETTINGS, ACK))
        elif kind == WINDOW_UPDATE:
            more = int.from_bytes(body, "big")
            if stream:
                self.windows[stream] += more
            else:
                self.window += more
        elif kind == HEADERS:
            self.trailers[stream] = self.trailers.get(stream, b"") + body
        elif kind == GOAWAY:
            self.closed = True
        if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
            self.ended.add(stream)

    def _put(self, data: bytes) -> None:
        self._unsent += data
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True


def frame(kind: int, flags: int = 0, stream: int = 0, body: bytes = b"") -> bytes:
    """One HTTP/2 frame."""
    return len(body).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + body


def message(size: int, body: bytes = b"") -> bytes:
    """The head of a gRPC message of `size` bytes, and the beginning of its body."""
    return b"\0" + size.to_bytes(4, "big") + body


def _field(name: str, value: str) -> bytes:
    """A header field as HPACK has it, neither indexed nor packed."""
    return b"\0" + b"".join(bytes((len(text),)) + text.encode() for text in (name, value))
