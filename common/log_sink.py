"""Where lines of a log go: never waited for, so that whoever reads them slowly, or not at all, holds nobody up."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TextIO
from weakref import finalize

_TURN_SECONDS = 0.1
"""How long a thread waits for another one's line, which may be stuck where a descriptor cannot but wait."""


class Sink:
    """A stream, or nothing. What cannot be written now is lost: whoever logs has something else to do than to fail by
    it, or to wait. `lost` is how many lines that was since one was written.

    A pipe or a socket takes as much as there is room for. The rest of a line goes before the next one.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._send = None if stream is None else _sender(stream, self)
        self._rest = b""
        self._lock = Lock()
        self.lost = 0

    def write(self, line: str) -> None:
        """Takes one line in, with its end. Threads that log at once write one after the other."""
        if self._stream is None:
            return
        if not self._lock.acquire(timeout=_TURN_SECONDS):
            self.lost += 1
            return
        try:
            self._write(self._stream, line)
        finally:
            self._lock.release()

    def _write(self, stream: TextIO, line: str) -> None:
        try:
            written = self._sent(line.encode(errors="backslashreplace")) if self._send else stream.write(line)
        except BrokenPipeError:
            self._give_up(stream)
        except OSError:  # a full disk, say, which may have room again
            self.lost += 1
        else:
            self.lost = 0 if written else self.lost + 1

    def flush(self) -> None:
        """Writes it out."""
        if self._stream is None or self._send:
            return
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._give_up(self._stream)
        except OSError:
            return

    def _give_up(self, stream: TextIO) -> None:
        """Nobody will read any more: nor shall the interpreter try again at its end."""
        self._send = None
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())

    def _sent(self, line: bytes) -> bool:
        """Whether there was room for the beginning of a line, behind the rest of the one before."""
        try:
            self._rest = self._rest[self._offer(self._rest) :]
            if self._rest:
                return False
            if taken := self._offer(line):
                self._rest = line[taken:]
        except BlockingIOError:
            return False
        return taken > 0

    def _offer(self, data: bytes) -> int:
        assert self._send is not None
        return self._send(data) if data else 0


def _sender(stream: TextIO, owner: Sink) -> Callable[[bytes], int] | None:
    """What writes to the stream's descriptor, if it has one, as long as `owner` lives: to a pipe or socket as much as
    there is room for, with BlockingIOError where there is none, but for another user's pipe. Others write there too
    and wait, so whether one waits is not set for all: a pipe is opened once more, a socket is told each time."""
    send: Callable[[bytes], int]
    end: Callable[[], None]
    descriptor = -1
    try:
        descriptor = stream.fileno()
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISFIFO(kind):
            pipe = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK)
            send, end = partial(os.write, pipe), partial(os.close, pipe)
        elif stat.S_ISSOCK(kind):
            connection = socket.socket(fileno=os.dup(descriptor))
            send, end = partial(_send_now, connection), connection.close
        else:
            return partial(os.write, descriptor)
        finalize(owner, end).atexit = False  # there may be last words
    except AttributeError:  # what is no file
        return None
    except OSError:  # it has no descriptor, or no other one may be had
        return None if descriptor < 0 else partial(os.write, descriptor)
    return send


def _send_now(connection: socket.socket, data: bytes) -> int:
    return connection.send(data, socket.MSG_DONTWAIT)
