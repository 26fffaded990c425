"""Who gets what: admission, content keys, the store, and one flight for all who want the same item.

Each caller holds a `Ticket`; when the last ticket of a flight is gone and no worker has begun on it, the flight is
dropped.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from common import log, tasks
from common.errors import Internal, NotFound, TwinlensError
from encoder_service.engine.admission import Admission, Seat
from encoder_service.engine.content import Contents
from encoder_service.engine.flight import Flight, Ticket
from encoder_service.engine.pipeline import Pipeline
from encoder_service.item import Header, Item, Key, Modality, Plan, Url

FlightKey = tuple[bytes, str, Modality]
"""A key of content stands for its salt and modality as well; one that a caller made up need not."""

_log = log.get("encode")


class Encoder:
    """The engine. It owns none of its parts; the server starts and stops them.

    At most `items` items and `size` bytes of media are held at once. `counts` are totals since start.
    """

    def __init__(self, pipeline: Pipeline, contents: Contents, digest: str, *, items: int, size: int) -> None:
        self.pipeline = pipeline
        self.digest = digest
        self.counts: Counter[str] = Counter()
        self._store = pipeline.store
        self._contents = contents
        self._admission = Admission(items, size)
        self._flights: dict[FlightKey, Flight] = {}
        self._warming: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def ticket(self, item: Item, mime_type: str, *, rows: bool) -> AsyncIterator[Ticket]:
        """Holds an item for the length of the block; `rows` says whether they are wanted, or the header alone.

        Raises InvalidInput for what no limit allows, Forbidden for an address that may not be fetched, and Exhausted
        where too much is held. The ticket's `header` fetches and hashes; it raises what `Contents.fetched` does,
        NotFound for a key that is not here, and Unavailable where nothing can be computed.
        """
        self._contents.check(item, mime_type)
        with self._admission.seat(item.size, item.field) as seat:
            ticket = Ticket(self._store, item, partial(self._embark, seat=seat, mime_type=mime_type, rows=rows))
            try:
                yield ticket
            finally:
                self._disembark(ticket)

    async def prefetch(self, item: Item, mime_type: str) -> tuple[Header, bool]:
        """Starts encoding into the store; returns the header, and whether the rows were there. Raises as `ticket`."""
        known: asyncio.Future[tuple[Header, bool]] = asyncio.get_running_loop().create_future()
        task = tasks.start(self._warm(item, mime_type, known), "prefetch")
        self._warming.add(task)
        task.add_done_callback(self._warming.discard)
        return await asyncio.shield(known)

    @property
    def queued(self) -> int:
        """Items that no worker has begun on, whatever they wait for."""
        return sum(not flight.started for flight in self._flights.values())

    def check_integrity(self, *, idle: bool = False) -> None:
        """Raises AssertionError where something leaked."""
        self._store.check_integrity(idle=idle)
        self.pipeline.staging.check_integrity(idle=idle)
        if idle:
            assert not self._flights, "a flight has no end"
            self._contents.check_integrity()
            self._admission.check_integrity()

    async def stop(self) -> None:
        """Ends every flight; their waiters get the error. Returns when no one holds an item any more.

        No worker may be alive, and no caller may come.
        """
        running = [*self._warming, *(flight.task for flight in self._flights.values() if flight.task)]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._admission.empty()

    async def _embark(self, ticket: Ticket, *, seat: Seat, mime_type: str, rows: bool) -> None:
        """Learns what an item is, and finds its entry or its flight."""
        item = ticket.item
        if isinstance(item.source, Url):
            if item.source.key and self._known(ticket, item.source.key, rows=rows):
                return
            with ticket.timed("fetch", self.pipeline.seconds):
                item = await self._contents.fetched(item, mime_type)
        if isinstance(item.source, Key):
            self._seek(ticket, item, item.source.value, rows=rows)
            return
        with ticket.timed("hash", self.pipeline.seconds):
            key = await self._contents.key(item)
        self._seek(ticket, item, key, rows=rows)
        if ticket.flight is not None and ticket.flight.item is item:
            seat.weigh(item.size)

    def _known(self, ticket: Ticket, key: bytes, *, rows: bool) -> bool:
        """What an address gave before is still here, so that it need not be fetched."""
        try:
            self._seek(ticket, dataclasses.replace(ticket.item, source=Key(key)), key, rows=rows)
        except NotFound:
            return False
        return True

    def _seek(self, ticket: Ticket, item: Item, key: bytes, *, rows: bool) -> None:
        """The entry of a key, pinned for the ticket, or a flight; raises NotFound for a key alone that has neither."""
        entry = self._store.find(key, item.salt)
        if entry is not None and entry.header.modality is item.modality:
            self.counts["hits"] += rows
            self._store.pin(entry)
            ticket.found = entry
            return
        if isinstance(item.source, Key) and (key, item.salt, item.modality) not in self._flights:
            raise NotFound("no such key is in the store", reason="KEY_NOT_FOUND", field=f"{item.field}.key")
        ticket.flight = self._board(item, key, rows=rows)

    def _disembark(self, ticket: Ticket) -> None:
        if ticket.flight is not None:
            self._leave(ticket.flight)
        elif ticket.found is not None:
            self._store.unpin(ticket.found)

    def _board(self, item: Item, key: bytes, *, rows: bool) -> Flight:
        name = (key, item.salt, item.modality)
        flight = self._flights.get(name)
        if rows:
            self.counts["hits" if flight and flight.wanted.is_set() else "misses"] += 1
        if flight is None:
            self.pipeline.dispatcher.check(key)
            loop = asyncio.get_running_loop()
            flight = Flight(key, item, loop.create_future(), loop.create_future(), priority=item.priority)
            self._flights[name] = flight
            flight.task = tasks.start(self._fly(flight), "flight")
        flight.tickets += 1
        flight.raise_priority(item.priority)
        if rows:
            flight.wanted.set()
        return flight

    def _leave(self, flight: Flight) -> None:
        flight.tickets -= 1
        if flight.tickets:
            return
        if flight.holds_entry:
            self._store.unpin(flight.entry.result())
        elif not flight.started and flight.task is not None:
            self._forget(flight)
            flight.task.cancel()

    def _forget(self, flight: Flight) -> None:
        """Lets no one join any more."""
        name = (flight.key, flight.item.salt, flight.item.modality)
        if self._flights.get(name) is flight:
            del self._flights[name]

    async def _fly(self, flight: Flight) -> None:
        """The flight's one task. It ends with both futures settled, or cancelled with no one waiting."""
        try:
            plan = await self.pipeline.plan(flight)
            header = _header(flight, plan)
            flight.header.set_result(header)
            await flight.wanted.wait()
            entry = await self.pipeline.compute(flight, plan, header)
        except TwinlensError as error:
            self.counts["failed"] += 1
            flight.fail(error)
        else:
            self.counts["encoded"] += 1
            flight.entry.set_result(entry)
            if not flight.tickets:
                self._store.unpin(entry)
        finally:
            self._forget(flight)
            flight.fail(Internal("the media could not be encoded", reason="ENCODE_FAILED"))

    async def _warm(self, item: Item, mime_type: str, known: asyncio.Future[tuple[Header, bool]]) -> None:
        try:
            async with self.ticket(item, mime_type, rows=True) as ticket:
                known.set_result((await ticket.header(), ticket.cached))
                await ticket.ready()
        except TwinlensError as error:
            if known.done():
                _log.info("a prefetched item failed", reason=error.reason)
            else:
                known.set_exception(error)
        finally:
            known.cancel()


def _header(flight: Flight, plan: Plan) -> Header:
    return Header(
        key=flight.key,
        modality=flight.item.modality,
        grid=plan.grid,
        tokens=plan.tokens,
        timestamps=plan.timestamps,
        seconds_per_grid=plan.seconds_per_grid,
    )
