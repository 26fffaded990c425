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

    Its task owns everything leased for it, and completes both futures.
    """

    key: bytes
    item: Item
    times: StageTimes
    priority: int
    room: Reservation | None = None
    """The reservation of its content, whoever brought it: held until its task has ended and its last caller has
    left."""
    tickets: int = 0
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when somebody wants rows, not only the header."""
    address: Ticket | None = None
    """A caller whose address gives the content of the key, in case its rows are lost; None if there is none."""
    task: asyncio.Task[None] | None = None
    header: asyncio.Future[Header] = field(default_factory=_future)
    from_shared_store: bool = False
    """The rows were in the shared store, so that nothing is computed."""
    units: list[Unit] = field(default_factory=list)
    unit_count: int = 0
    """The number of its units; 0 while unknown."""
    allocation: Allocation | None = None
    """Where its rows are written; None before that, and after a failure."""
    landed: Progress = field(default_factory=Progress)
    """Rows that have been written, from the first on; complete once there is an entry."""
    entry: asyncio.Future[Entry] = field(default_factory=_future)

    @property
    def started(self) -> bool:
        """A worker has begun on it."""
        return any(unit.started_at for unit in self.units)

    @property
    def all_started(self) -> bool:
        """Whether workers have begun on all of it, so that it runs to its end."""
        return 0 < self.unit_count == sum(unit.started_at > 0 for unit in self.units)

    @property
    def holds_entry(self) -> bool:
        """Its rows are in the store, pinned once for its tickets."""
        return self.entry.done() and not self.entry.cancelled() and self.entry.exception() is None

    async def more(self, first: int) -> None:
        """Waits until more than `first` rows have been written. Raises the item's error, also if such rows were there
        and have been given up."""
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
        """A caller releases it."""
        self.tickets -= 1
        self._let_content_go()

    def run_by(self, task: asyncio.Task[None]) -> None:
        """This task completes it."""
        self.task = task
        task.add_done_callback(lambda _: self._let_content_go())

    def address_known(self, ticket: Ticket) -> None:
        """A caller's address gave this content before."""
        self.address = ticket

    def take_room(self, room: Reservation) -> None:
        """Its item's content takes this room."""
        self._let_room_go()
        self.room = room.hold()

    def content_came(self, item: Item) -> None:
        """Content has arrived for a flight that had only a key."""
        if isinstance(self.item.source, Key) and not isinstance(item.source, Key):
            self.item = item

    def _let_content_go(self) -> None:
        if not self.tickets and self.task is not None and self.task.done():
            self.item = replace(self.item, source=Key(self.key))  # references to it no longer hold content
            self._let_room_go()

    def _let_room_go(self) -> None:
        if self.room is not None:
            self.room.let_go()
            self.room = None

    def header_known(self, header: Header, *, from_shared_store: bool = False) -> Header:
        """Sets the header. Returns the header for callers, who may know more from a replica that had the item. Raises
        Unavailable if it contradicts what they were told."""
        self.from_shared_store = from_shared_store
        if not self.header.done():
            self.header.set_result(header)
        elif not self.header.result().agrees(header):
            raise Unavailable("the announced rows are lost, and new ones would differ", reason=MEDIA_CHANGED)
        return self.header.result()

    def allocated(self, allocation: Allocation) -> None:
        """Its rows will be written there."""
        self.allocation = allocation

    def rows_lost(self) -> None:
        """The rows written so far are invalid, and will not be written there again."""
        self.allocation, self.from_shared_store = None, False

    def cut(self, unit_count: int) -> None:
        """Its work is divided into so many units."""
        self.unit_count = unit_count

    def submitted(self, unit: Unit) -> None:
        """The next of its units waits for a worker."""
        self.times.stage = "vit"
        self.units.append(unit)

    def unit_done(self, unit: Unit, first_row: int) -> None:
        """A unit has ended. Those who are told of new rows find their place as well."""
        if unit.copy is not None and self.allocation is not None:
            self.allocation.copies[first_row] = unit.copy
        count = 0
        for each in self.units:
            if not each.done.done() or each.done.cancelled() or each.done.exception():
                break
            count += each.piece.tokens
        self.landed.advance(count)

    def completed(self, entry: Entry) -> None:
        """All rows have been written."""
        self.entry.set_result(entry)
        self.landed.advance(entry.header.tokens)

    def failed(self, error: TwinlensError) -> None:
        """Fails the futures that are not complete; an error that nobody waits for is not logged."""
        without_traces(error)  # frames of this lead to the item's content, and back to the error
        for future in (self.header, self.entry):
            if not future.done():
                future.set_exception(error)
                future.exception()
        self.landed.fail(error)


class Ticket:
    """One caller's hold on an item. Valid inside `EncoderEngine.ticket`, for one task at a time, after its `resolve`.

    `resolve` sets `flight` or `found`, the store's entry; until then `times` tells what is being done. `rows` says
    whether the caller wants rows, or only the header.
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
        """What is being done for the item now."""
        if self.flight is None:
            return "transfer" if self.found else self.times.stage
        stage = self.flight.times.stage
        return "queue" if stage == "vit" and not self.flight.started else stage

    @property
    def stages(self) -> dict[str, Stage]:
        """The stages of the item so far."""
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
        """Rows that have been written, from the first on."""
        return self.entry.header.tokens if self.flight is None else self.flight.landed.count

    async def more(self, first: int) -> None:
        """Waits until more than `first` rows have been written; raises the item's error."""
        if self.flight is not None:
            await self._heard(self.flight.more(first))

    @property
    def allocation(self) -> Allocation | None:
        """Where the `landed` rows are; readers must pin it before they wait for anything. None if the flight has failed
        since `more` returned, which then raises the reason."""
        return self.entry.allocation if self.flight is None else self.flight.allocation

    @property
    def entry(self) -> Entry:
        """The rows' entry, after `ready`; pinned for as long as the ticket is held."""
        assert self.found is not None
        return self.found

    async def _heard(self, what: Awaitable[T]) -> T:
        """Gives each caller its own copy of an error, which names the item's field in that caller's request."""
        assert self.flight is not None
        try:
            return await what
        except TwinlensError as shared:
            place = self.flight.item.field if shared.field else None
            raise without_traces(shared).at(self.item.field, instead_of=place) from None
