"""Coordinates admission, content keys, the store, and one flight for all who want the same item.

Each caller holds a `Ticket`; when the last ticket of a flight is gone, the flight is dropped.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from common.aio import tasks
from common.errors import Internal, NotFound, TwinlensError, without_traces
from common.media.item import Header, Key, Modality, Url
from common.rows.wire import RowLayout
from common.telemetry import log
from encoder_service.engine.admission import Admission
from encoder_service.engine.flight import Flight, Ticket
from encoder_service.engine.load import EncoderLoad
from encoder_service.engine.pipeline import Pipeline, not_found
from encoder_service.engine.progress import StageTimes
from encoder_service.item import Item

FlightKey = tuple[bytes, str, Modality]
"""A key of content stands for its salt and modality as well; one that a caller made up need not."""

_LINGER = 1.0

_log = log.get("encode")


class EncoderEngine:
    """The engine. Its parts are owned, started and stopped by the server.

    `admission` bounds what is held at once. A partly computed video continues for `linger` seconds after its last
    caller has left. `totals` are those of items since start.
    """

    def __init__(self, pipeline: Pipeline, digest: str, admission: Admission, *, linger: float = _LINGER) -> None:
        self.pipeline = pipeline
        self.digest = digest
        self.totals = pipeline.totals
        self._store = pipeline.store
        self._contents = pipeline.contents
        self._linger = linger
        self._admission = admission
        self._flights: dict[FlightKey, Flight] = {}
        self._running: set[asyncio.Task[None]] = set()
        """Tasks of flights, of abandoned ones until they end, and of prefetches."""

    @asynccontextmanager
    async def ticket(self, item: Item, *, rows: bool) -> AsyncIterator[Ticket]:
        """Holds an item for the duration of the context; `rows` says whether the rows are wanted, or only the header.

        Raises InvalidInput if a limit is exceeded, Forbidden for an address that may not be fetched, and Exhausted if
        too much is held.
        """
        self._contents.check(item)
        with self._admission.reserve(item.size, item.field) as reservation:
            times = StageTimes("hash", self.pipeline.seconds)
            ticket = Ticket(item, reservation, times, rows=rows)
            try:
                yield ticket
            finally:
                self._release(ticket)

    async def resolve(self, ticket: Ticket) -> Header:
        """Returns an item's header once it is known, and has its rows found or computed. To be called once.

        Raises as `Contents.fetched`, NotFound for a key that is not here, Unavailable if nothing can be computed, and
        any other error of the item.
        """
        item, room = ticket.item, ticket.reservation
        async with AsyncExitStack() as fetched:
            # 1. The rows of an address may still be here. If not, it is fetched, once for all who want it.
            if isinstance(item.source, Url):
                if item.source.known_key and await self._is_known(ticket, item.source):
                    return await ticket.header()
                with ticket.times.timed("fetch"):
                    item, room = await fetched.enter_async_context(self._contents.fetched(item, room))
            # 2. The key.
            if isinstance(item.source, Key):
                key = item.source.value
            else:
                with ticket.times.timed("hash"):
                    key = await self._contents.key(item)
            # 3. An entry of the store, or a flight.
            self._look_up(ticket, item, key)
            if ticket.flight is not None and ticket.flight.item is item:
                room.resize(item.size)  # an address is not held beside its content
                ticket.flight.take_room(room)
            del item  # content that another caller brought already is not held twice
        # 4. The header, which the flight computes.
        return await ticket.header()

    async def prefetch(self, item: Item) -> tuple[Header, bool]:
        """Starts encoding into the store. Returns the header, and whether the rows were there. Raises as `ticket`."""
        known: asyncio.Future[tuple[Header, bool]] = asyncio.get_running_loop().create_future()
        self._start(self._prefetch(item, known), "prefetch")
        return await asyncio.shield(known)

    async def has(self, keys: Sequence[bytes], salt: str) -> list[bool]:
        """Which keys have rows under this salt, here or in the shared store."""
        here = [self._store.has(key, salt) for key in keys]
        elsewhere = [key for key, present in zip(keys, here, strict=True) if not present]
        shared_store = self.pipeline.shared_store
        if shared_store is None or not elsewhere:
            return here
        found = dict(zip(elsewhere, await shared_store.find_all(elsewhere, salt), strict=True))
        return [present or found[key] is not None for key, present in zip(keys, here, strict=True)]

    @property
    def layout(self) -> RowLayout:
        """The layout of its rows."""
        return self.pipeline.layout

    @property
    def devices(self) -> list[str]:
        """The device of each worker."""
        return self.pipeline.dispatcher.devices

    def load(self) -> EncoderLoad:
        """The engine's current load and its totals."""
        dispatcher, store, shared_store = self.pipeline.dispatcher, self._store, self.pipeline.shared_store
        running = dispatcher.running
        return EncoderLoad(
            queued_items=sum(not flight.started for flight in self._flights.values()),
            running_items=len({unit.key for unit in running}),
            queued_patches=sum(unit.patches for unit in dispatcher.waiting),
            running_patches=sum(unit.patches for unit in running),
            estimated_seconds=dispatcher.estimate(),
            items=self.totals,
            store_bytes=store.used,
            store_capacity_bytes=store.capacity,
            store_entries=len(store),
            shared_store=None if shared_store is None else shared_store.counts,
            workers_alive=dispatcher.alive,
            worker_busy_seconds=dispatcher.busy_seconds,
            batches=dispatcher.totals,
            decoder_restarts=self.pipeline.media.decoders.processes.restarts,
            stage_seconds=self.pipeline.seconds,
        )

    async def flush(self) -> tuple[int, int]:
        """Drops all entries that nobody reads: returns how many entries and bytes. Their memory has been returned to
        the system afterwards, unless a NIXL agent has it registered."""
        entries = size = 0
        for some, of_them in self._store.flush_in_parts():
            entries, size = entries + some, size + of_them
            await asyncio.sleep(0)
        await self._store.shrink()
        return entries, size

    def check_integrity(self) -> None:
        """Raises AssertionError if its parts disagree."""
        self._store.check_integrity()
        self.pipeline.media.staging.check_integrity()
        self.pipeline.dispatcher.check_integrity()

    def check_idle(self) -> None:
        """Raises AssertionError if something has leaked."""
        self._store.check_idle()
        self.pipeline.media.staging.check_idle()
        self.pipeline.dispatcher.check_idle()
        assert not self._flights, "a flight has no end"
        self._contents.check_idle()
        self._admission.check_idle()

    async def stop(self) -> None:
        """Ends every flight; their waiters get the error. Returns when no one holds an item any more.

        No worker may be alive, and no caller may come.
        """
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._admission.drain()
        await self.pipeline.media.staging.drain()

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = tasks.start(work, name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _is_known(self, ticket: Ticket, source: Url) -> bool:
        """Whether the rows of an address are here from before, or in the shared store, so that it need not be
        fetched."""
        try:
            self._look_up(ticket, dataclasses.replace(ticket.item, source=Key(source.known_key)), source.known_key)
            if ticket.flight is not None:
                ticket.flight.address_known(ticket)
                await ticket.header()
        except NotFound:
            self._release(ticket)
            return False
        return True

    def _look_up(self, ticket: Ticket, item: Item, key: bytes) -> None:
        """Finds a key's entry, pinned for the ticket, or its flight; raises NotFound for a key without content that has
        neither."""
        entry = self._store.find(key, item.salt)
        if entry is not None and entry.header.modality is item.modality:
            self.totals.hits += ticket.rows
            self._store.pin(entry.allocation)
            ticket.found = entry
            return
        may_come = self.pipeline.shared_store is not None or _name(key, item) in self._flights
        if isinstance(item.source, Key) and not may_come:
            raise not_found(f"{item.field}.key")
        ticket.flight = self._join(item, key, rows=ticket.rows)

    def _join(self, item: Item, key: bytes, *, rows: bool) -> Flight:
        """The flight of a key, which one more caller holds from now on."""
        flight = self._flights.get(_name(key, item))
        if flight is None:
            flight = Flight(key, item, StageTimes("inspect", self.pipeline.seconds), item.priority)
            self._flights[_name(key, item)] = flight
            flight.run_by(self._start(self._run(flight), "flight"))
        elif flight.wanted.is_set():
            self.totals.hits += rows
        flight.join(item, rows=rows)
        return flight

    def _release(self, ticket: Ticket) -> None:
        flight, found, ticket.flight, ticket.found = ticket.flight, ticket.found, None, None
        if flight is not None:
            self._leave(flight)
        elif found is not None:
            self._store.unpin(found.allocation)

    def _leave(self, flight: Flight) -> None:
        flight.leave()
        if flight.tickets:
            return
        if flight.holds_entry:
            self._store.unpin(flight.entry.result().allocation)
        elif flight.started:  # partly computed: kept for a moment, in case a caller's stream broke
            asyncio.get_running_loop().call_later(self._linger, self._drop, flight)
        else:
            self._drop(flight)

    def _drop(self, flight: Flight) -> None:
        """Ends a flight that nobody wants, unless workers have begun on all of it."""
        if not (flight.tickets or flight.all_started or flight.entry.done() or flight.task is None):
            self._forget(flight)
            for unit in flight.units:  # at once: a worker might get one before the task is cancelled
                self.pipeline.dispatcher.withdraw(unit)
            flight.task.cancel()

    def _forget(self, flight: Flight) -> None:
        """Removes a flight, so that no one can join it any more."""
        name = _name(flight.key, flight.item)
        if self._flights.get(name) is flight:
            del self._flights[name]

    async def _run(self, flight: Flight) -> None:
        """The flight's one task. It ends with both futures completed, or cancelled with no one waiting."""
        try:
            entry = await self.pipeline.run(flight)
        except TwinlensError as error:
            self.totals.failed += not isinstance(error, NotFound)  # for a bare key nothing was to be encoded
            flight.failed(error)
        except asyncio.CancelledError as left:
            without_traces(left)  # the flight keeps the error, whose frames hold the content
            raise
        else:
            flight.completed(entry)
            if not flight.tickets:
                self._store.unpin(entry.allocation)
        finally:
            self._forget(flight)
            flight.failed(Internal("the media could not be encoded", reason="ENCODE_FAILED"))

    async def _prefetch(self, item: Item, known: asyncio.Future[tuple[Header, bool]]) -> None:
        try:
            async with self.ticket(item, rows=True) as ticket:
                known.set_result((await self.resolve(ticket), ticket.cached))
                await ticket.ready()
        except TwinlensError as error:
            if known.done():
                _log.info("a prefetched item failed", reason=error.reason)
            else:
                known.set_exception(without_traces(error))
        finally:
            known.cancel()


def _name(key: bytes, item: Item) -> FlightKey:
    return key, item.salt, item.modality
