"""Who gets what: admission, content keys, the store, and one flight for all who want the same item.

Each caller holds a `Ticket`; when the last ticket of a flight is gone and no worker has begun on it, the flight is
dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from common import identity, log, tasks
from common.errors import Exhausted, Internal, NotFound, TwinlensError
from encoder_service.engine.flight import Flight, Ticket
from encoder_service.engine.pipeline import Pipeline, in_thread
from encoder_service.engine.store import Entry
from encoder_service.item import Embedding, Header, Item, Key, Pixels, Plan
from encoder_service.media import limits

_SMALL = 64 << 10
"""Bytes that are hashed faster than a thread is asked to."""

_log = log.get("encode")


class Encoder:
    """The engine. It owns none of its parts; the server starts and stops them.

    At most `items` items and `size` bytes of media are held at once. `counts` are totals since start.
    """

    def __init__(
        self, pipeline: Pipeline, media_limits: limits.MediaLimits, digest: str, *, items: int, size: int
    ) -> None:
        self.pipeline = pipeline
        self.digest = digest
        self.counts: Counter[str] = Counter()
        self._store = pipeline.store
        self._limits = media_limits
        self._most_items = items
        self._most_bytes = size
        self._flights: dict[bytes, Flight] = {}
        self._warming: set[asyncio.Task[None]] = set()
        self._items = 0
        self._bytes = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @asynccontextmanager
    async def ticket(self, item: Item, mime_type: str, *, rows: bool) -> AsyncIterator[Ticket]:
        """Holds an item for the length of the block; `rows` says whether they are wanted, or the header alone.

        Raises InvalidInput for what no limit allows, NotFound for a key that is not here, Exhausted where too much is
        held, Unavailable where nothing can be computed.
        """
        limits.check_item(item, mime_type, self._limits)
        with self._admitted(item):
            key = await self._identify(item)
            entry = self._find(item, key)
            if entry is not None:
                self.counts["hits"] += rows
                self._store.pin(entry)
                try:
                    yield Ticket(self._store, item, None, entry)
                finally:
                    self._store.unpin(entry)
                return
            flight = self._board(item, key, rows=rows)
            try:
                yield Ticket(self._store, item, flight, None)
            finally:
                self._leave(flight)

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
            assert not self._items, "an item was not signed out"
            assert not self._bytes, "bytes were not signed out"

    async def stop(self) -> None:
        """Ends every flight; their waiters get the error. Returns when no one holds an item any more.

        No worker may be alive, and no caller may come.
        """
        running = [*self._warming, *(flight.task for flight in self._flights.values() if flight.task)]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._empty.wait()

    @contextmanager
    def _admitted(self, item: Item) -> Iterator[None]:
        too_large = self._bytes + item.size > self._most_bytes and self._bytes
        if self._items >= self._most_items or too_large:
            raise Exhausted("the encoder has as many items as it may hold", reason="QUEUE_FULL", field=item.field)
        self._items += 1
        self._bytes += item.size
        self._empty.clear()
        try:
            yield
        finally:
            self._items -= 1
            self._bytes -= item.size
            if not self._items:
                self._empty.set()

    async def _identify(self, item: Item) -> bytes:
        if isinstance(item.source, Key):
            return item.source.value
        started = time.perf_counter()
        try:
            return self._hash(item) if item.size <= _SMALL else await in_thread(self._hash, item)
        finally:
            self.pipeline.seconds["hash"] += time.perf_counter() - started

    def _hash(self, item: Item) -> bytes:
        source, about = item.source, item.options.stated()
        match source:
            case Pixels():
                about |= {"pixels": [source.frames, source.height, source.width], "seconds": source.timestamps}
                content = source.data
            case Embedding():
                about |= {"rows": [source.grid.t, source.grid.h, source.grid.w]}
                content = source.data
            case _:
                assert isinstance(source, bytes)
                content = source
        return identity.content_key(self.digest, item.modality.value, about, item.salt, [content])

    def _find(self, item: Item, key: bytes) -> Entry | None:
        entry = self._store.find(key, item.salt)
        if not isinstance(item.source, Key):
            return entry
        if entry is not None and entry.header.modality is item.modality:
            return entry
        flight = self._flights.get(key)
        if flight is None or (flight.item.salt, flight.item.modality) != (item.salt, item.modality):
            raise NotFound("no such key is in the store", reason="KEY_NOT_FOUND", field=f"{item.field}.key")
        return None

    def _board(self, item: Item, key: bytes, *, rows: bool) -> Flight:
        flight = self._flights.get(key)
        if rows:
            self.counts["hits" if flight and flight.wanted.is_set() else "misses"] += 1
        if flight is None:
            self.pipeline.dispatcher.check(key)
            loop = asyncio.get_running_loop()
            flight = Flight(key, item, loop.create_future(), loop.create_future(), priority=item.priority)
            self._flights[key] = flight
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
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]

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
