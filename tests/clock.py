"""The event loop's clock, put forward by a test: the fixture is `forward`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

Forward = Callable[[float], None]
"""Puts the clock forward by so many seconds; but for that it stands still."""


async def turns(count: int = 3) -> None:
    """Lets the loop look at its timers."""
    for _ in range(count):
        await asyncio.sleep(0)
