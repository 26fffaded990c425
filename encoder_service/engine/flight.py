"""An item in flight, shared by everyone who asked for it, and one caller's hold on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from common.errors import TwinlensError
from common.media.item import Header
from encoder_service.engine.batching import Unit
from encoder_service.engine.embedding_store import Allocation, Entry
from encoder_service.engine.progress import Progress
from encoder_service.item import Item
from encoder_service.media.allowance import Allowance

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Flight:
    """An item that is being encoded. Its task owns what is leased for it, and completes both futures."""

    key: bytes
    item: Item
    header: asyncio.Future[Header]
    entry: asyncio.Future[Entry]
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    tickets: int = 0
    priority: int = 0
    stage: str = "inspect"
    units: list[Unit] = field(default_factory=list)
    parts: int = 0
    """How many units there are going to be; 0 while that is not known."""
    allocation: Allocation | None = None
    """Where its rows are being written; None before, and once that has failed."""
    landed: Progress = field(default_factory=Progress)
    """Rows that are there, from the first on; complete once the entry is."""
    timings: dict[str, float] = field(default_factory=dict)
    allowance: Allowance | None = None
    """The decode processes' time that is left to it; None before they are asked."""
    task: asyncio.Task[None] | None = None
    found: bool = False
    """The rows were in the shared tier, so that nothing is computed."""
    bring: Callable[[str], Awaitable[Item]] | None = None
    """Brings the content of a key whose rows are lost after all, as an item at a field; None where no one can."""

    @property
    def started(self) -> bool:
        """A worker has begun on it."""
        return any(unit.started_at for unit in self.units)

    @property
    def begun(self) -> bool:
        """Workers have begun on all of it, so that it runs to its end."""
        return 0 < self.parts == sum(unit.started_at > 0 for unit in self.units)

    @property
    def holds_entry(self) -> bool:
        """Its rows are in the store, pinned once for its tickets."""
        return self.entry.done() and not self.entry.cancelled() and self.entry.exception() is None

    def raise_priority(self, priority: int) -> None:
        """Someone is in more of a hurry than those before."""
        self.priority = max(self.priority, priority)
        for unit in self.units:
            unit.priority = self.priority

    async def more(self, first: int) -> None:
        """Returns once more than `first` rows are there. Raises what the item fails with, also where such rows were
        there and have been given up since."""
        await self.landed.reach(first + 1)
        if self.allocation is None:
            await asyncio.shield(self.entry)

    def arrive(self, entry: Entry) -> None:
        """All rows are there."""
        self.entry.set_result(entry)
        self.landed.advance(entry.header.tokens)

    def fail(self, error: TwinlensError) -> None:
        """Settles what is not completed yet; an error that no one waits for is no one's."""
        for future in (self.header, self.entry):
            if not future.done():
                future.set_exception(error)
                future.exception()
        self.landed.fail(error)


class Ticket:
    """One caller's hold on an item. Valid inside `Encoder.ticket`, for one task at a time; `header` comes first.

    `flight` or `found`, the store's entry, is set once it is known what the item is; until then `step` is what is being
    done to learn it.
    """

    def __init__(self, item: Item, resolve: Callable[[Ticket], Awaitable[None]]) -> None:
        self.item = item
        self.flight: Flight | None = None
        self.found: Entry | None = None
        self.step = "hash"
        self._resolve = resolve
        self._seconds: dict[str, float] = {}

    @property
    def cached(self) -> bool:
        """The rows were here when the caller asked, after `header`."""
        return self.flight is None or self.flight.found

    @property
    def stage(self) -> str:
        """What is being done for the item now."""
        if self.flight is None:
            return "transfer" if self.found else self.step
        return "queue" if self.flight.stage == "vit" and not self.flight.started else self.flight.stage

    @property
    def timings(self) -> dict[str, float]:
        """Seconds by stage."""
        return self._seconds | (self.flight.timings if self.flight else {})

    @contextmanager
    def timed(self, step: str, totals: MutableMapping[str, float]) -> Iterator[None]:
        """The block is a step on the way to knowing what the item is; its seconds are added to `totals` as well."""
        started, self.step = time.perf_counter(), step
        try:
            yield
        finally:
            self._seconds[step] = time.perf_counter() - started
            totals[step] = totals.get(step, 0.0) + self._seconds[step]

    async def header(self) -> Header:
        """Dimensions and key, as soon as they are known; raises the item's error."""
        if self.flight is None and self.found is None:
            await self._resolve(self)
        if self.flight is None:
            return self.entry.header
        return await self._heard(asyncio.shield(self.flight.header))

    async def ready(self) -> None:
        """Returns when the rows are in the store; raises the item's error."""
        if self.flight is not None:
            self.found = await self._heard(asyncio.shield(self.flight.entry))

    @property
    def landed(self) -> int:
        """Rows that are there, from the first on, after `header`."""
        return self.entry.header.tokens if self.flight is None else self.flight.landed.count

    async def more(self, first: int) -> None:
        """Returns once more than `first` rows are there, after `header`; raises the item's error."""
        if self.flight is not None:
            await self._heard(self.flight.more(first))

    @property
    def allocation(self) -> Allocation | None:
        """Where the rows are, of which `landed` are there; whoever reads them pins it before they wait for anything.
        None where the rest has failed since `more` returned, which then says why."""
        return self.entry.allocation if self.flight is None else self.flight.allocation

    @property
    def entry(self) -> Entry:
        """The rows' entry, after `ready`; pinned for as long as the ticket is held."""
        assert self.found is not None
        return self.found

    async def _heard(self, what: Awaitable[T]) -> T:
        """Each caller gets an error of its own, which names the item by its place in the caller's own request."""
        assert self.flight is not None
        try:
            return await what
        except TwinlensError as shared:
            raise shared.at(self.item.field, instead_of=self.flight.item.field if shared.field else None) from None
