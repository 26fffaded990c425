"""Waiting for a state, not for a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def until(holds: Callable[[], object], what: str, seconds: float = 180.0) -> None:
    """Asks again and again until `holds()` is true; fails with `what` when it never is.

    `seconds` only ends a test that has failed: it is far more than a slow and busy machine needs.
    """
    end, pause = time.monotonic() + seconds, 0.005
    while not holds():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(pause)
        pause = min(1.2 * pause, 0.05)  # who asks for seconds takes the cores from what it waits for


async def eventually(holds: Callable[[], object], what: str, seconds: float = 180.0) -> None:
    """`until`, for what this event loop does: it asks between two turns, and so finds nothing half done."""
    end, pause = time.monotonic() + seconds, 0.005
    while not holds():
        assert time.monotonic() < end, f"never: {what}"
        await asyncio.sleep(pause)
        pause = min(1.2 * pause, 0.05)
