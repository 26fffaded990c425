"""A child process's end of the socket to its parent, and how it avoids outliving the parent. `children` is the parent's
end."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import threading
from typing import Any, Generic, TypeVar

import msgspec

LENGTH = struct.Struct("<I")
"""Precedes each message: its length in bytes."""

_PR_SET_PDEATHSIG = 1

ReceiveT = TypeVar("ReceiveT")


def die_with_parent(parent: int = 0) -> None:
    """Has the kernel kill this process when its parent ends; exits at once if it has ended already. A forked process
    states its `parent`; for one started by `Child`, the environment does."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if str(os.getppid()) != (str(parent) if parent else os.environ.get("TWINLENS_PARENT", str(os.getppid()))):
        raise SystemExit("the parent process has ended")


def leave_signals_to_parent() -> None:
    """Ignores signals that a terminal sends to its whole process group, and systemd to a whole unit: the parent lets
    running work finish first, and ends us then."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


class ParentLink(Generic[ReceiveT]):
    """The child's end: blocking, for a process that computes in one thread.

    `receive` raises EOFError when the parent is gone, and the child should then exit.
    """

    def __init__(self, fd: int, receives: Any) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(receives).decode
        self._buffer = bytearray()
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Sends a message, from any thread; raises EOFError when the parent is gone."""
        body = self._encode(message)
        try:
            with self._sending:
                self._socket.sendall(LENGTH.pack(len(body)) + body)
        except (BrokenPipeError, ConnectionError) as error:
            raise EOFError("the parent process has ended") from error

    def receive(self) -> ReceiveT:
        """Waits for the parent's next message."""
        while (message := self._take()) is None:
            self._fill(0)
        return message

    def poll(self) -> ReceiveT | None:
        """The parent's next message if one is here, else None."""
        message = self._take()
        while message is None and self._fill(socket.MSG_DONTWAIT):
            message = self._take()
        return message

    def _take(self) -> ReceiveT | None:
        if len(self._buffer) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._buffer)
        end = LENGTH.size + length
        if len(self._buffer) < end:
            return None
        message: ReceiveT = self._decode(memoryview(self._buffer)[LENGTH.size : end].tobytes())
        del self._buffer[:end]
        return message

    def _fill(self, flags: int) -> bool:
        """Reads what has arrived; False if nothing has."""
        try:
            piece = self._socket.recv(1 << 20, flags)
        except BlockingIOError:
            return False
        except ConnectionError as error:
            raise EOFError("the parent process has ended") from error
        if not piece:
            raise EOFError("the parent process has ended")
        self._buffer += piece
        return True
