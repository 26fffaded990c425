"""Log lines that anybody can cause: a few of them are written, and the others counted."""

from __future__ import annotations

import time

STRANGERS_SECONDS = 1.0
"""From one line about callers who are turned away to the next."""


class RateLimit:
    """Allows one log line in so many seconds, and counts the others: strangers must not fill a disk."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = 0.0
        self._suppressed = 0

    def take(self) -> int | None:
        """How many were not let through since the last one; None for one that is not."""
        now = time.monotonic()
        if now < self._next:
            self._suppressed += 1
            return None
        suppressed, self._suppressed, self._next = self._suppressed, 0, now + self._seconds
        return suppressed
