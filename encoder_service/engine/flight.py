"""An item in flight, shared by everyone who asked for it, and one caller's hold on it."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from common.errors import TwinlensError
from encoder_service.engine.batching import Unit
from encoder_service.engine.store import Entry, Store
from encoder_service.item import Header, Item

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Flight:
    """An item that is being encoded. Its task owns what is leased for it, and settles both futures."""

    key: bytes
    item: Item
    header: asyncio.Future[Header]
    entry: asyncio.Future[Entry]
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    tickets: int = 0
    priority: int = 0
    stage: str = "inspect"
    units: list[Unit] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None

    @property
    def started(self) -> bool:
        """A worker has begun on it, so that it runs to its end."""
        return any(unit.started_at for unit in self.units)

    @property
    def holds_entry(self) -> bool:
        """Its rows are in the store, pinned once for its tickets."""
        return self.entry.done() and not self.entry.cancelled() and self.entry.exception() is None

    def raise_priority(self, priority: int) -> None:
        """Someone is in more of a hurry than those before."""
        self.priority = max(self.priority, priority)
        for unit in self.units:
            unit.priority = self.priority

    def fail(self, error: TwinlensError) -> None:
        """Settles what is not settled yet; an error that no one waits for is no one's."""
        for future in (self.header, self.entry):
            if not future.done():
                future.set_exception(error)
                future.exception()


class Ticket:
    """One caller's hold on an item. Valid inside `Encoder.ticket`."""

    def __init__(self, store: Store, item: Item, flight: Flight | None, entry: Entry | None) -> None:
        self._store = store
        self._item = item
        self._flight = flight
        self._entry = entry

    @property
    def cached(self) -> bool:
        """The rows were here when the caller asked."""
        return self._flight is None

    @property
    def stage(self) -> str:
        """What is being done for the item now."""
        if self._flight is None:
            return "transfer"
        return "queue" if self._flight.stage == "vit" and not self._flight.started else self._flight.stage

    @property
    def timings(self) -> dict[str, float]:
        """Seconds by stage; empty for a hit."""
        return self._flight.timings if self._flight else {}

    async def header(self) -> Header:
        """Dimensions and key, as soon as they are known; raises the item's error."""
        if self._flight is None:
            assert self._entry is not None
            return self._entry.header
        return await self._heard(asyncio.shield(self._flight.header))

    async def ready(self) -> None:
        """Returns when the rows are in the store; raises the item's error."""
        if self._flight is not None:
            self._entry = await self._heard(asyncio.shield(self._flight.entry))

    @property
    def entry(self) -> Entry:
        """The rows' entry, after `ready`; pinned for as long as the ticket is held."""
        assert self._entry is not None
        return self._entry

    @contextmanager
    def rows(self) -> Iterator[memoryview]:
        """The rows' bytes, after `ready`."""
        assert self._entry is not None
        with self._store.pinned(self._entry) as data:
            yield data

    async def _heard(self, what: Awaitable[T]) -> T:
        """Each caller gets an error of its own, which names the item by its place in the caller's own request."""
        assert self._flight is not None
        try:
            return await what
        except TwinlensError as shared:
            error = copy.copy(shared)
            error.field = self._item.field + shared.field.removeprefix(self._flight.item.field)
            raise error from None
