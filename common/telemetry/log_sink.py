"""Where lines of a log go: never waited for, so that whoever reads them slowly, or not at all, holds nobody up."""

from __future__ import annotations

import os
import select
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TextIO
from weakref import finalize

_TURN_SECONDS = 0.2
"""How long a thread waits for another one's line, which may be stuck where a descriptor cannot but wait."""
_REST_SECONDS, _LAST_SECONDS = 0.1, 1.0
"""How long the rest of a line waits for a reader, as long as one reads, and as the process ends."""


class Sink:
    """A stream, or nothing. What cannot be written now is lost: whoever logs has something else to do than to fail by
    it, or to wait. `lost` is how many lines that was since one was written.

    A pipe or a socket takes as much as there is room for. The rest of a line goes as soon as a reader makes room, which
    is waited for once, and before the next line.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._send, self._descriptor = (None, -1) if stream is None else _sender(stream, self)
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

    def finish(self) -> None:
        """Before the process ends: sends the rest of a line that a reader still makes room for."""
        with suppress(OSError):
            self._send_rest(_LAST_SECONDS)

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
        self._send, self._rest = None, b""
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
                self._send_rest(_REST_SECONDS)
        except BlockingIOError:
            return False
        return taken > 0

    def _send_rest(self, seconds: float) -> None:
        """For so long at most."""
        if not self._rest:
            return
        room = select.poll()
        room.register(self._descriptor, select.POLLOUT)
        end = time.monotonic() + seconds
        while self._rest and (left := end - time.monotonic()) > 0 and room.poll(1000 * left):
            with suppress(BlockingIOError):
                self._rest = self._rest[self._offer(self._rest) :]

    def _offer(self, data: bytes) -> int:
        assert self._send is not None
        return self._send(data) if data else 0


def _sender(stream: TextIO, owner: Sink) -> tuple[Callable[[bytes], int] | None, int]:
    """What writes to the stream's descriptor, if it has one, as long as `owner` lives, and the descriptor.

    To a pipe or socket as much is written as there is room for, with BlockingIOError where there is none, but for
    another user's pipe. Others write there too and wait, so whether one waits is not set for all: a pipe is opened once
    more, a socket is told each time.
    """
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
            return partial(os.write, descriptor), descriptor
        finalize(owner, end).atexit = False  # there may be last words
    except AttributeError:  # what is no file
        return None, -1
    except OSError:  # it has no descriptor, or no other one may be had
        return (None if descriptor < 0 else partial(os.write, descriptor)), descriptor
    return send, descriptor


def _send_now(connection: socket.socket, data: bytes) -> int:
    return connection.send(data, socket.MSG_DONTWAIT)
