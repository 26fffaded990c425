"""An item in flight, shared by everyone who asked for it, and one caller's hold on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from common.errors import MEDIA_CHANGED, TwinlensError, Unavailable, without_traces
from common.media.item import Header, Key
from common.telemetry.stages import Stage
from encoder_service.engine.admission import Reservation
from encoder_service.engine.batching import Unit
from encoder_service.engine.embedding_store import Allocation, Entry
from encoder_service.engine.progress import Progress, StageTimes
from encoder_service.item import Item

T = TypeVar("T")


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False)
class Flight:
    """An item that is being encoded. Everyone reads its fields; only its own methods change them.

    Its task owns what is leased for it, and completes both futures.
    """

    key: bytes
    item: Item
    times: StageTimes
    priority: int
    room: Reservation | None = None
    """Of its item's content, whoever brought it: held until its task has ended and its last caller has left."""
    tickets: int = 0
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    """Somebody wants rows, and not the header alone."""
    address: Ticket | None = None
    """Of a caller whose address gives the content of the key, should its rows be lost; None where no one has one."""
    task: asyncio.Task[None] | None = None
    header: asyncio.Future[Header] = field(default_factory=_future)
    from_shared_store: bool = False
    """The rows were in the shared store, so that nothing is computed."""
    units: list[Unit] = field(default_factory=list)
    unit_count: int = 0
    """How many units there are going to be; 0 while that is not known."""
    allocation: Allocation | None = None
    """Where its rows are being written; None before, and once that has failed."""
    landed: Progress = field(default_factory=Progress)
    """Rows that are there, from the first on; complete once the entry is."""
    entry: asyncio.Future[Entry] = field(default_factory=_future)

    @property
    def started(self) -> bool:
        """A worker has begun on it."""
        return any(unit.started_at for unit in self.units)

    @property
    def all_started(self) -> bool:
        """Workers have begun on all of it, so that it runs to its end."""
        return 0 < self.unit_count == sum(unit.started_at > 0 for unit in self.units)

    @property
    def holds_entry(self) -> bool:
        """Its rows are in the store, pinned once for its tickets."""
        return self.entry.done() and not self.entry.cancelled() and self.entry.exception() is None

    async def more(self, first: int) -> None:
        """Returns once more than `first` rows are there. Raises what the item fails with, also where such rows were
        there and have been given up since."""
        await self.landed.reach(first + 1)
        if self.allocation is None:
            await asyncio.shield(self.entry)

    def join(self, item: Item, *, rows: bool) -> None:
        """One more caller holds it, and has come with `item`; `rows` says whether they are wanted."""
        self.tickets += 1
        self.content_came(item)
        self.priority = max(self.priority, item.priority)
        for unit in self.units:
            unit.priority = self.priority
        if rows:
            self.wanted.set()

    def leave(self) -> None:
        """A caller lets go of it."""
        self.tickets -= 1
        self._let_content_go()

    def run_by(self, task: asyncio.Task[None]) -> None:
        """This task completes it."""
        self.task = task
        task.add_done_callback(lambda _: self._let_content_go())

    def address_known(self, ticket: Ticket) -> None:
        """A caller's address gave this content before."""
        self.address = ticket

    def holds(self, room: Reservation) -> None:
        """Its item's content takes this room."""
        self._let_room_go()
        self.room = room.hold()

    def content_came(self, item: Item) -> None:
        """Where it was known by its key alone, here is what it is a key of."""
        if isinstance(self.item.source, Key) and not isinstance(item.source, Key):
            self.item = item

    def _let_content_go(self) -> None:
        if not self.tickets and self.task is not None and self.task.done():
            self.item = replace(self.item, source=Key(self.key))  # what still refers to it holds no content
            self._let_room_go()

    def _let_room_go(self) -> None:
        if self.room is not None:
            self.room.let_go()
            self.room = None

    def header_known(self, header: Header, *, from_shared_store: bool = False) -> Header:
        """What it is, is known; returns what callers are told, who may know more from another replica that had it.
        Raises Unavailable where they were told otherwise."""
        self.from_shared_store = from_shared_store
        if not self.header.done():
            self.header.set_result(header)
        elif not self.header.result().agrees(header):
            raise Unavailable("the announced rows are lost, and new ones would differ", reason=MEDIA_CHANGED)
        return self.header.result()

    def allocated(self, allocation: Allocation) -> None:
        """Its rows are written there from now on."""
        self.allocation = allocation

    def rows_lost(self) -> None:
        """What was written of its rows is of no use, and they are written there no more."""
        self.allocation, self.from_shared_store = None, False

    def cut(self, unit_count: int) -> None:
        """It is computed in so many units."""
        self.unit_count = unit_count

    def submitted(self, unit: Unit) -> None:
        """The next of its units waits for a worker."""
        self.times.stage = "vit"
        self.units.append(unit)

    def unit_done(self, unit: Unit, first_row: int) -> None:
        """A unit has ended. Whoever hears that more rows have landed finds where they are as well."""
        if unit.copy is not None and self.allocation is not None:
            self.allocation.copies[first_row] = unit.copy
        count = 0
        for each in self.units:
            if not each.done.done() or each.done.cancelled() or each.done.exception():
                break
            count += each.piece.tokens
        self.landed.advance(count)

    def completed(self, entry: Entry) -> None:
        """All rows are there."""
        self.entry.set_result(entry)
        self.landed.advance(entry.header.tokens)

    def failed(self, error: TwinlensError) -> None:
        """Completes what is not completed yet; an error that no one waits for is no one's."""
        without_traces(error)  # frames of this lead to the item's content, and back to the error
        for future in (self.header, self.entry):
            if not future.done():
                future.set_exception(error)
                future.exception()
        self.landed.fail(error)


class Ticket:
    """One caller's hold on an item. Valid inside `EncoderEngine.ticket`, for one task at a time, after its `resolve`.

    That sets `flight` or `found`, the store's entry; until then `times` says what is being done to learn what the item
    is. `rows` says whether the caller wants them, or the header alone.
    """

    def __init__(self, item: Item, reservation: Reservation, times: StageTimes, *, rows: bool) -> None:
        self.item = item
        self.reservation = reservation
        self.times = times
        self.rows = rows
        self.flight: Flight | None = None
        self.found: Entry | None = None

    @property
    def cached(self) -> bool:
        """The rows were here when the caller asked."""
        return self.flight is None or self.flight.from_shared_store

    @property
    def stage(self) -> str:
        """What is being done for the item now, at any time."""
        if self.flight is None:
            return "transfer" if self.found else self.times.stage
        stage = self.flight.times.stage
        return "queue" if stage == "vit" and not self.flight.started else stage

    @property
    def stages(self) -> dict[str, Stage]:
        """What was done for it so far."""
        return self.times.stages | (self.flight.times.stages if self.flight else {})

    async def header(self) -> Header:
        """Dimensions and key, as soon as they are known; raises the item's error."""
        if self.flight is None:
            return self.entry.header
        return await self._heard(asyncio.shield(self.flight.header))

    async def ready(self) -> None:
        """Returns when the rows are in the store; raises the item's error."""
        if self.flight is not None:
            self.found = await self._heard(asyncio.shield(self.flight.entry))

    @property
    def landed(self) -> int:
        """Rows that are there, from the first on."""
        return self.entry.header.tokens if self.flight is None else self.flight.landed.count

    async def more(self, first: int) -> None:
        """Returns once more than `first` rows are there; raises the item's error."""
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
            place = self.flight.item.field if shared.field else None
            raise without_traces(shared).at(self.item.field, instead_of=place) from None
