"""The time for which one item may keep decode processes at work: all of its jobs, and all attempts, together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from common.processes import cpu_seconds


class Allowance:
    """`left` is in seconds. A process that waits for its turn on a core spends nothing: what counts is the processor
    time that it has had, or the time that has passed, whichever is less."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds

    @contextmanager
    def spent_by(self, pid: int) -> Iterator[None]:
        """In the block, the process with this id works for the item."""
        began, before = time.monotonic(), cpu_seconds(pid) or 0.0
        try:
            yield
        finally:
            passed, after = time.monotonic() - began, cpu_seconds(pid)
            self.left -= passed if after is None else min(passed, after - before)
