"""Who gets what: admission, content keys, the store, and one flight for all who want the same item.

Each caller holds a `Ticket`; when the last ticket of a flight is gone, the flight is dropped, unless workers have begun
on all of it. One that they have begun on in part is kept for a moment, for a caller whose stream broke.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from common import log, tasks
from common.errors import MEDIA_CHANGED, Internal, NotFound, TwinlensError, Unavailable
from common.media.item import Header, Key, Modality, Url
from encoder_service.engine.admission import Admission, Reservation
from encoder_service.engine.content import Contents
from encoder_service.engine.flight import Flight, Ticket
from encoder_service.engine.journey import Journey, not_found
from encoder_service.engine.pipeline import Pipeline
from encoder_service.engine.shared_tier import SharedTier
from encoder_service.item import Item

FlightKey = tuple[bytes, str, Modality]
"""A key of content stands for its salt and modality as well; one that a caller made up need not."""

_LINGER = 1.0

_log = log.get("encode")


class Encoder:
    """The engine. It owns none of its parts; the server starts and stops them.

    At most `items` items and `size` bytes of media are held at once. A video of which some is computed goes on for
    `linger` seconds after its last caller has left. `counts` are totals since start.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        contents: Contents,
        digest: str,
        *,
        items: int,
        size: int,
        tier: SharedTier | None = None,
        linger: float = _LINGER,
    ) -> None:
        self.pipeline = pipeline
        self.digest = digest
        self.counts: Counter[str] = Counter()
        self._store = pipeline.store
        self._contents = contents
        self._tier = tier
        self._linger = linger
        self._journey = Journey(pipeline, tier, self.counts)
        self._admission = Admission(items, size)
        self._flights: dict[FlightKey, Flight] = {}
        self._running: set[asyncio.Task[None]] = set()
        """Flights, those that nobody wants any more until they have ended as well, and prefetches."""

    @asynccontextmanager
    async def ticket(self, item: Item, mime_type: str, *, rows: bool) -> AsyncIterator[Ticket]:
        """Holds an item for the length of the block; `rows` says whether they are wanted, or the header alone.

        Raises InvalidInput for what no limit allows, Forbidden for an address that may not be fetched, and Exhausted
        where too much is held. The ticket's `header` fetches and hashes; it raises what `Contents.fetched` does,
        NotFound for a key that is not here, and Unavailable where nothing can be computed.
        """
        self._contents.check(item, mime_type)
        with self._admission.reserve(item.size, item.field) as reservation:
            ticket = Ticket(item, partial(self._resolve, reservation=reservation, mime_type=mime_type, rows=rows))
            try:
                yield ticket
            finally:
                self._release(ticket)

    async def prefetch(self, item: Item, mime_type: str) -> tuple[Header, bool]:
        """Starts encoding into the store; returns the header, and whether the rows were there. Raises as `ticket`."""
        known: asyncio.Future[tuple[Header, bool]] = asyncio.get_running_loop().create_future()
        self._start(self._prefetch(item, mime_type, known), "prefetch")
        return await asyncio.shield(known)

    async def has(self, keys: Sequence[bytes], salt: str) -> list[bool]:
        """Which keys have rows, here or in the shared tier, that were made under this salt."""
        here = [self._store.has(key, salt) for key in keys]
        elsewhere = [key for key, present in zip(keys, here, strict=True) if not present]
        if self._tier is None or not elsewhere:
            return here
        found = dict(zip(elsewhere, await self._tier.find_all(elsewhere, salt), strict=True))
        return [present or found[key] is not None for key, present in zip(keys, here, strict=True)]

    @property
    def tier_counts(self) -> Mapping[str, int] | None:
        """What the shared tier did; None where there is none."""
        return None if self._tier is None else self._tier.counts

    @property
    def queued(self) -> int:
        """Items that no worker has begun on, whatever they wait for."""
        return sum(not flight.started for flight in self._flights.values())

    def check_integrity(self, *, idle: bool = False) -> None:
        """Raises AssertionError where something leaked."""
        self._store.check_integrity(idle=idle)
        self.pipeline.staging.check_integrity(idle=idle)
        self.pipeline.dispatcher.check_integrity(idle=idle)
        if idle:
            assert not self._flights, "a flight has no end"
            self._contents.check_integrity()
            self._admission.check_integrity()

    async def stop(self) -> None:
        """Ends every flight; their waiters get the error. Returns when no one holds an item any more.

        No worker may be alive, and no caller may come.
        """
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._admission.drain()
        await self.pipeline.staging.drain()

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = tasks.start(work, name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _resolve(self, ticket: Ticket, *, reservation: Reservation, mime_type: str, rows: bool) -> None:
        """Learns what an item is, and finds its entry or its flight."""
        item = ticket.item
        if isinstance(item.source, Url):
            bring = partial(self._bring, ticket, item.source.known_key, reservation, mime_type)
            if item.source.known_key and await self._resolve_known(ticket, item.source.known_key, bring, rows=rows):
                return
            with ticket.timed("fetch", self.pipeline.seconds):
                item = await self._contents.fetched(item, mime_type)
        if isinstance(item.source, Key):
            self._look_up(ticket, item, item.source.value, rows=rows)
            return
        with ticket.timed("hash", self.pipeline.seconds):
            key = await self._contents.key(item)
        self._look_up(ticket, item, key, rows=rows)
        if ticket.flight is not None and ticket.flight.item is item:
            reservation.resize(item.size)

    async def _resolve_known(
        self, ticket: Ticket, key: bytes, bring: Callable[[str], Awaitable[Item]], *, rows: bool
    ) -> bool:
        """What an address gave before is still here, so that it need not be fetched."""
        try:
            self._look_up(ticket, dataclasses.replace(ticket.item, source=Key(key)), key, rows=rows)
            if ticket.flight is not None:
                ticket.flight.bring = bring
                await ticket.header()
        except NotFound:
            self._release(ticket)
            return False
        return True

    async def _bring(self, ticket: Ticket, key: bytes, reservation: Reservation, mime_type: str, field: str) -> Item:
        """What the ticket's address gives, as an item at `field`, for everyone who was told that its rows are here;
        raises as `Contents.fetched`, and Unavailable where it is something else by now."""
        brought = await self._contents.fetched(dataclasses.replace(ticket.item, field=field), mime_type)
        if await self._contents.key(brought) != key:
            raise Unavailable("an address gives other media than before", reason=MEDIA_CHANGED, field=brought.field)
        if ticket.flight is not None:  # its caller is still there
            reservation.resize(brought.size)
        return brought

    def _look_up(self, ticket: Ticket, item: Item, key: bytes, *, rows: bool) -> None:
        """The entry of a key, pinned for the ticket, or a flight; raises NotFound for a key alone that has neither."""
        entry = self._store.find(key, item.salt)
        if entry is not None and entry.header.modality is item.modality:
            self.counts["hits"] += rows
            self._store.pin(entry.allocation)
            ticket.found = entry
            return
        if isinstance(item.source, Key) and self._tier is None and _name(key, item) not in self._flights:
            raise not_found(f"{item.field}.key")
        ticket.flight = self._join(item, key, rows=rows)

    def _release(self, ticket: Ticket) -> None:
        flight, found, ticket.flight, ticket.found = ticket.flight, ticket.found, None, None
        if flight is not None:
            self._leave(flight)
        elif found is not None:
            self._store.unpin(found.allocation)

    def _join(self, item: Item, key: bytes, *, rows: bool) -> Flight:
        name = _name(key, item)
        flight = self._flights.get(name)
        if flight is not None and flight.wanted.is_set():
            self.counts["hits"] += rows
        if flight is not None and isinstance(flight.item.source, Key) and not isinstance(item.source, Key):
            flight.item = item  # it brings the content, should the rows not be found
        if flight is None:
            loop = asyncio.get_running_loop()
            flight = Flight(key, item, loop.create_future(), loop.create_future(), priority=item.priority)
            self._flights[name] = flight
            flight.task = self._start(self._run(flight), "flight")
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
            self._store.unpin(flight.entry.result().allocation)
        elif flight.started:
            asyncio.get_running_loop().call_later(self._linger, self._drop, flight)
        else:
            self._drop(flight)

    def _drop(self, flight: Flight) -> None:
        """Ends a flight that nobody wants, unless workers have begun on all of it."""
        if not (flight.tickets or flight.begun or flight.entry.done() or flight.task is None):
            self._forget(flight)
            flight.task.cancel()

    def _forget(self, flight: Flight) -> None:
        """Lets no one join any more."""
        name = _name(flight.key, flight.item)
        if self._flights.get(name) is flight:
            del self._flights[name]

    async def _run(self, flight: Flight) -> None:
        """The flight's one task. It ends with both futures completed, or cancelled with no one waiting."""
        try:
            entry = await self._journey.go(flight)
        except TwinlensError as error:
            self.counts["failed"] += not isinstance(error, NotFound)  # of a key alone nothing was to be encoded
            flight.fail(error)
        else:
            flight.arrive(entry)
            if not flight.tickets:
                self._store.unpin(entry.allocation)
        finally:
            self._forget(flight)
            flight.fail(Internal("the media could not be encoded", reason="ENCODE_FAILED"))

    async def _prefetch(self, item: Item, mime_type: str, known: asyncio.Future[tuple[Header, bool]]) -> None:
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


def _name(key: bytes, item: Item) -> FlightKey:
    return key, item.salt, item.modality
