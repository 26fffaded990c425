"""Ends the engine's wait for messages from another thread of its process."""

from __future__ import annotations

import contextlib
import os


class Wake:
    """A flag that `select` can wait for: `set` by any thread, cleared by the one that waits."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Readable while the flag is set."""
        return self._fd

    def set(self) -> None:
        """Ends the wait that goes on, or the next one."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Takes the flag down; nothing happens where it is down."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Gives the descriptor back; not used any more after that."""
        os.close(self._fd)
