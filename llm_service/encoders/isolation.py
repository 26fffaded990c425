"""Keeps items over which an encoder has died, maybe by chance, apart from each other.

One of them may be deadly. If others were with it at the next encoder, its death would count against them a second time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager


class Isolation:
    """Which request's suspects are at which encoder: those of one request at a time. All items of a request may be
    there together, since the request needs them all to begin."""

    def __init__(self) -> None:
        self._there: dict[str, list[int]] = {}
        self._left = asyncio.Event()

    def taken(self, request: object) -> set[str]:
        """Addresses of the encoders that have a suspect of another request."""
        return {address for address, there in self._there.items() if any(other != id(request) for other in there)}

    @contextmanager
    def at(self, address: str, request: object) -> Iterator[None]:
        """A suspect of this request is at the encoder for the length of the block."""
        there = self._there.setdefault(address, [])
        there.append(id(request))
        try:
            yield
        finally:
            there.remove(id(request))
            if not there:
                self._there.pop(address, None)
            self._left.set()

    async def one_left(self, until: float) -> None:
        """Returns when a suspect has left an encoder, or at `until`, in monotonic seconds."""
        self._left.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._left.wait()
