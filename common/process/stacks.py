"""Stacks of a child process's threads, which its parent has it write before giving it up, so that the log shows where
it hung. Python's `faulthandler` writes them from a signal handler, even if no thread gets the interpreter."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
from collections import deque
from collections.abc import Callable
from time import monotonic
from traceback import walk_tb

SIGNAL = signal.SIGUSR1

_VARIABLE = "TWINLENS_STACKS"
_SECONDS, _LOOK_SECONDS = 1.0, 0.05
"""How long a child is waited for, and the interval of reading what it has written."""
_MOST_BYTES = 16 << 10


def write_when_asked() -> None:
    """For a child, before it starts its own: has it write its threads' stacks where its parent reads them."""
    if fd := os.environ.pop(_VARIABLE, ""):
        faulthandler.register(SIGNAL, file=int(fd), all_threads=True)


def place(error: BaseException) -> str:
    """What was raised, and where.

    >>> import json
    >>> try: json.loads("?")
    ... except ValueError as error: place(error).rpartition(", ")[0]
    'JSONDecodeError in json.decoder.JSONDecoder.raw_decode'
    """
    frame, line = deque(walk_tb(error.__traceback__), 1).pop()
    return f"{type(error).__name__} in {frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}, line {line}"


class Stacks:
    """The parent's side, for one child that inherits the descriptor `fd` and has `environ` in its environment."""

    def __init__(self) -> None:
        """Raises OSError if no descriptor is free."""
        self.fd = os.memfd_create("twinlens-stacks", os.MFD_CLOEXEC)
        self.environ = {_VARIABLE: str(self.fd)}

    async def read(self, ask: Callable[[int], None]) -> str:
        """What the child writes after the signal, which `ask` sends: at most 16 KiB; what there is after a second;
        nothing once it is closed. A child that has not called `write_when_asked` yet is killed by the signal."""
        size = begin = os.fstat(self.fd).st_size  # it may have been asked before, and lived
        ask(SIGNAL)
        end = monotonic() + _SECONDS
        while monotonic() < end:
            await asyncio.sleep(_LOOK_SECONDS)
            if self.fd < 0:  # the child has ended meanwhile
                return ""
            before, size = size, os.fstat(self.fd).st_size
            if begin < size == before:
                break
        return os.pread(self.fd, _MOST_BYTES, begin).decode(errors="replace")

    def close(self) -> None:
        """Once the child has been started, and nothing is read any more; again is of no account."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
