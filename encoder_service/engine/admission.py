"""Bounds how much is held at once: items, and the bytes of their content."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import Exhausted


class Reservation:
    """Bytes that count as held until the last holder has released them: a caller inside `Admission.reserve`, others who
    need the content, and whatever is made from it."""

    def __init__(self, admission: Admission, size: int, field: str) -> None:
        self._admission = admission
        self._field = field
        self.size = size
        self.holders = 1

    def resize(self, size: int) -> None:
        """Changes the number of bytes; raises Exhausted if that is too much."""
        if size > self.size:
            self._admission.check_bytes(size, self._field, of_which_held=self.size)
        self._admission.bytes += size - self.size
        self.size = size

    def hold(self) -> Reservation:
        """Adds a holder; returns itself."""
        self.holders += 1
        return self

    def let_go(self) -> None:
        """Removes a holder."""
        self.holders -= 1
        if not self.holders:
            self.resize(0)


class Admission:
    """At most `max_items` items and `max_bytes` bytes; a single item of any size is let in."""

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self.items = 0
        self.bytes = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def reserve(self, size: int, field: str) -> Iterator[Reservation]:
        """Reserves room for an item for the duration of the context; raises Exhausted at once if there is none."""
        if self.items >= self._max_items:
            raise _full(field)
        self.check_bytes(size, field)
        reservation = Reservation(self, size, field)
        self.items += 1
        self.bytes += size
        self._empty.clear()
        try:
            yield reservation
        finally:
            self.items -= 1
            reservation.let_go()
            if not self.items:
                self._empty.set()

    def for_all(self, field: str) -> Reservation:
        """An empty reservation that does not count as an item, for content that stays when its caller leaves."""
        return Reservation(self, 0, field)

    def check_bytes(self, size: int, field: str, *, of_which_held: int = 0) -> None:
        """Raises Exhausted if an item of so many bytes is too much beside the others."""
        others = self.bytes - of_which_held
        if size and others and others + size > self._max_bytes:
            raise _full(field)

    async def drain(self) -> None:
        """Waits until nothing is held."""
        await self._empty.wait()

    def check_idle(self) -> None:
        """Raises AssertionError if something is held."""
        assert not self.items, "an item was not signed out"
        assert not self.bytes, "bytes were not signed out"


def _full(field: str) -> Exhausted:
    return Exhausted("the encoder has as many items as it may hold", reason="QUEUE_FULL", field=field)
