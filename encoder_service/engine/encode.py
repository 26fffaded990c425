"""The life of an item: key, store, header, room, decode, worker, rows.

Identical items in flight share one `Flight`. Each caller holds a `Ticket`; when the last ticket of a flight
is gone and no worker has begun on it, the flight is dropped. Everything that a flight leases is held in
`with` blocks of its one task.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from common import identity, log
from common.arena import Range
from common.errors import Exhausted, Internal, NotFound, TwinlensError
from common.wire import RowLayout
from encoder_service.engine.batching import Unit, cut
from encoder_service.engine.dispatch import Dispatcher
from encoder_service.engine.staging import Lease, Staging
from encoder_service.engine.store import Entry, Store
from encoder_service.item import Header, Inspection, Item, Key, Modality, Pixels, Plan
from encoder_service.media import geometry, limits
from encoder_service.media.decoder import DecoderPool
from encoder_service.models.config import ModelConfig
from encoder_service.worker.messages import Piece

_SMALL = 64 << 10
"""Bytes that are hashed faster than a thread is asked to."""

_COPY = 4 << 20
"""Bytes copied at a time, so that a large copy in a thread does not keep the event loop from running."""

_WORTH_CUTTING = 2048
"""Patches below which a run of frame groups is not worth a worker of its own."""

T = TypeVar("T")

_log = log.get("encode")


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much may be in the service at once, and in one frame group or batch."""

    items: int
    bytes: int
    max_patches: int
    batch_patches: int


@dataclass(slots=True, eq=False)
class Flight:
    """An item that is being encoded, for everyone who asked for it. Its task owns what is leased."""

    key: bytes
    item: Item
    header: asyncio.Future[Header]
    entry: asyncio.Future[Entry]
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    tickets: int = 0
    stage: str = "hash"
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


class Ticket:
    """One caller's hold on an item. Valid inside `Encoder.ticket`."""

    def __init__(self, store: Store, flight: Flight | None, entry: Entry | None, key: bytes) -> None:
        self._store = store
        self._flight = flight
        self._entry = entry
        self.key = key

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
        return await asyncio.shield(self._flight.header)

    async def ready(self) -> None:
        """Returns when the rows are in the store; raises the item's error."""
        if self._flight is not None:
            self._entry = await asyncio.shield(self._flight.entry)

    @contextmanager
    def rows(self) -> Iterator[memoryview]:
        """The rows' bytes, after `ready`."""
        assert self._entry is not None
        with self._store.pinned(self._entry) as data:
            yield data


class Encoder:
    """The engine. It owns none of its parts; the server starts and stops them."""

    def __init__(
        self,
        config: ModelConfig,
        media_limits: limits.MediaLimits,
        bounds: Bounds,
        digest: str,
        layout: RowLayout,
        staging: Staging,
        store: Store,
        decoders: DecoderPool,
        dispatcher: Dispatcher,
    ) -> None:
        self.config = config
        self.limits = media_limits
        self.bounds = bounds
        self.digest = digest
        self.layout = layout
        self.staging = staging
        self.store = store
        self.dispatcher = dispatcher
        self._decoders = decoders
        self._flights: dict[bytes, Flight] = {}
        self._warming: set[asyncio.Task[None]] = set()
        self._items = 0
        self._bytes = 0
        self.counts: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @asynccontextmanager
    async def ticket(self, item: Item, mime_type: str, *, rows: bool) -> AsyncIterator[Ticket]:
        """Holds an item for the length of the block; `rows` says whether they are wanted, or the header
        alone.

        Raises InvalidInput for what no limit allows, NotFound for a key that is not here, Exhausted where too
        much is waiting, Unavailable where nothing can be computed.
        """
        limits.check_item(item, mime_type, self.limits)
        with self._admitted(item):
            key = await self._identify(item)
            entry = self._find(item, key)
            if entry is not None:
                self.counts["hits"] += rows
                self.store.pin(entry)
                try:
                    yield Ticket(self.store, None, entry, key)
                finally:
                    self.store.unpin(entry)
                return
            flight = self._board(item, key, rows=rows)
            try:
                yield Ticket(self.store, flight, None, key)
            finally:
                self._leave(flight)

    async def prefetch(self, item: Item, mime_type: str) -> tuple[Header, bool]:
        """Starts encoding into the store; returns the header, and whether the rows were there. Raises as
        `ticket`."""
        known: asyncio.Future[tuple[Header, bool]] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._warm(item, mime_type, known))
        self._warming.add(task)
        task.add_done_callback(self._warming.discard)
        task.add_done_callback(_report)
        return await asyncio.shield(known)

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

    @property
    def queued(self) -> int:
        """Items that no worker has begun on, whatever they wait for."""
        return sum(not flight.started for flight in self._flights.values())

    def check_integrity(self, *, idle: bool = False) -> None:
        """Raises AssertionError where something leaked."""
        self.store.check_integrity(idle=idle)
        self.staging.check_integrity(idle=idle)
        if idle:
            assert not self._flights, "a flight has no end"
            assert not self._items, "an item was not signed out"
            assert not self._bytes, "bytes were not signed out"

    async def stop(self) -> None:
        """Ends every flight; their waiters get the error."""
        tasks = [*self._warming, *(flight.task for flight in self._flights.values() if flight.task)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @contextmanager
    def _admitted(self, item: Item) -> Iterator[None]:
        if self._items >= self.bounds.items or self._bytes + item.size > max(self.bounds.bytes, item.size):
            raise Exhausted("the encoder has as many items as it may hold", reason="QUEUE_FULL")
        self._items += 1
        self._bytes += item.size
        try:
            yield
        finally:
            self._items -= 1
            self._bytes -= item.size

    async def _identify(self, item: Item) -> bytes:
        if isinstance(item.source, Key):
            return item.source.value
        started = time.perf_counter()
        if item.size <= _SMALL:
            key = self._hash(item)
        else:
            key = await _in_thread(self._hash, item)
        self.seconds["hash"] += time.perf_counter() - started
        return key

    def _hash(self, item: Item) -> bytes:
        source, options = item.source, item.options.stated()
        if isinstance(source, Pixels):
            options |= {"pixels": [source.frames, source.height, source.width], "seconds": source.timestamps}
            content = source.data
        else:
            assert isinstance(source, bytes)
            content = source
        return identity.content_key(self.digest, item.modality.value, options, item.salt, [content])

    def _find(self, item: Item, key: bytes) -> Entry | None:
        entry = self.store.find(key, item.salt)
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
            self.dispatcher.check(key)
            loop = asyncio.get_running_loop()
            flight = Flight(key, item, loop.create_future(), loop.create_future())
            self._flights[key] = flight
            flight.task = asyncio.create_task(self._fly(flight))
            flight.task.add_done_callback(_report)
        flight.tickets += 1
        if rows:
            flight.wanted.set()
        return flight

    def _leave(self, flight: Flight) -> None:
        flight.tickets -= 1
        if flight.tickets:
            return
        if flight.holds_entry:
            self.store.unpin(flight.entry.result())
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
            plan = await self._plan(flight)
            header = _header(flight, plan)
            flight.header.set_result(header)
            await flight.wanted.wait()
            entry = await self._compute(flight, plan, header)
        except TwinlensError as error:
            self.counts["failed"] += 1
            if error.field == "" and flight.item.field:
                error.field = flight.item.field
            _fail(flight, error)
        else:
            self.counts["encoded"] += 1
            flight.entry.set_result(entry)
            if not flight.tickets:
                self.store.unpin(entry)
        finally:
            self._forget(flight)
            _fail(flight, Internal("the media could not be encoded", reason="ENCODE_FAILED"))

    async def _plan(self, flight: Flight) -> Plan:
        item, config = flight.item, self.config
        video = item.modality is Modality.VIDEO
        if isinstance(item.source, Pixels):
            plan = geometry.plan_pixels(item.source, config, item.options, video=video)
        else:
            seen = await self._inspect(flight, item.source, video=video)
            if video:
                limits.check_video(seen, item.field, self.limits)
                plan = geometry.plan_video(seen, config.video, item.options, self.limits.max_frames)
            else:
                limits.check_picture(seen, item.field, self.limits)
                plan = geometry.plan_image(seen, config.image, item.options)
        limits.check_plan(plan, item.field, self.limits, self.bounds.max_patches)
        return plan

    async def _inspect(self, flight: Flight, source: bytes | Key, *, video: bool) -> Inspection:
        assert isinstance(source, bytes)
        with self._stage(flight, "inspect"):
            async with self.staging.lease(len(source)) as lease:
                await self._fill(lease.ranges[0], source)
                return await self._decoders.inspect(lease.ranges[0], video=video, field=flight.item.field)

    async def _compute(self, flight: Flight, plan: Plan, header: Header) -> Entry:
        """Rows into the store; the entry comes back pinned once, for the flight."""
        with self._stage(flight, "room"):
            rows = await self.store.reserve(plan.tokens)
        try:
            async with self._decoded(flight, plan) as pixels:
                await self._run(flight, plan, pixels, rows)
        except BaseException:
            self.store.abandon(rows)
            raise
        return self.store.commit(rows, header, flight.item.salt)

    @asynccontextmanager
    async def _decoded(self, flight: Flight, plan: Plan) -> AsyncIterator[Range]:
        """The decoded pixels' place in the staging arena."""
        source = flight.item.source
        if isinstance(source, Pixels):
            async with self._room(flight, plan.pixel_bytes) as lease:
                await self._fill(lease.ranges[0], _padded(source, plan))
                yield lease.ranges[0]
            return
        assert isinstance(source, bytes)
        async with self._room(flight, len(source), plan.pixel_bytes) as lease:
            encoded, pixels = lease.ranges
            with self._stage(flight, "decode"):
                await self._fill(encoded, source)
                video = flight.item.modality is Modality.VIDEO
                await self._decoders.decode(encoded, pixels, plan, video=video, field=flight.item.field)
            lease.free(encoded)
            yield pixels

    @asynccontextmanager
    async def _room(self, flight: Flight, *sizes: int) -> AsyncIterator[Lease]:
        flight.stage = "room"
        async with self.staging.lease(*sizes) as lease:
            yield lease

    async def _run(self, flight: Flight, plan: Plan, pixels: Range, rows: Range) -> None:
        """Queues the item, whole or cut, and waits until no worker can write its rows any more."""
        flight.stage, submitted = "vit", time.perf_counter()
        units = flight.units
        try:
            for first, end in self._cuts(plan):
                piece, patches = self._piece(flight, plan, pixels, rows, first, end)
                units.append(self.dispatcher.submit(flight.key, piece, patches, flight.item.priority))
            await asyncio.wait([unit.done for unit in units])
            if errors := [error for unit in units if (error := unit.done.exception())]:
                raise errors[0]
        finally:
            for unit in units:
                self.dispatcher.withdraw(unit)
            begun = min((unit.started_at for unit in units if unit.started_at), default=time.perf_counter())
            self._count(flight, "queue", begun - submitted)
            self._count(flight, "vit", time.perf_counter() - begun)

    def _cuts(self, plan: Plan) -> list[tuple[int, int]]:
        return cut(plan.grid, self.bounds.batch_patches, self.dispatcher.alive, _WORTH_CUTTING)

    def _piece(self, flight: Flight, plan: Plan, pixels: Range, rows: Range, first: int, end: int) -> tuple[Piece, int]:
        """Frame groups [first, end) of a plan, and their patches."""
        per_group = len(plan.frames) // plan.grid.t
        frame_bytes = plan.height * plan.width * 3
        row_bytes = plan.tokens // plan.grid.t * self.layout.row_bytes
        piece = Piece(
            video=flight.item.modality is Modality.VIDEO,
            pixels=pixels.offset + first * per_group * frame_bytes,
            frames=(end - first) * per_group,
            height=plan.height,
            width=plan.width,
            resized=plan.resized,
            grid=(end - first, plan.grid.h, plan.grid.w),
            rows=rows.offset + first * row_bytes,
        )
        return piece, (end - first) * plan.grid.h * plan.grid.w

    async def _fill(self, span: Range, data: bytes) -> None:
        if len(data) <= _COPY:
            self.staging.buffer.slice(span)[:] = data
        else:
            await _in_thread(self._copy, span, data)

    def _copy(self, span: Range, data: bytes) -> None:
        source, target = memoryview(data), self.staging.buffer.slice(span)
        for start in range(0, len(data), _COPY):
            target[start : start + _COPY] = source[start : start + _COPY]

    @contextmanager
    def _stage(self, flight: Flight, name: str) -> Iterator[None]:
        started, flight.stage = time.perf_counter(), name
        try:
            yield
        finally:
            self._count(flight, name, time.perf_counter() - started)

    def _count(self, flight: Flight, name: str, seconds: float) -> None:
        flight.timings[name] = flight.timings.get(name, 0.0) + seconds
        self.seconds[name] += seconds


def _header(flight: Flight, plan: Plan) -> Header:
    return Header(
        key=flight.key,
        modality=flight.item.modality,
        grid=plan.grid,
        tokens=plan.tokens,
        timestamps=plan.timestamps,
        seconds_per_grid=plan.seconds_per_grid,
    )


def _fail(flight: Flight, error: TwinlensError) -> None:
    """Settles what is not settled yet; an error that no one waits for is no one's."""
    for future in (flight.header, flight.entry):
        if not future.done():
            future.set_exception(error)
            future.exception()


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        _log.error("a task failed", exc_info=error)


def _padded(source: Pixels, plan: Plan) -> bytes:
    """Frames as the plan has them: the last one again, until the last frame group is whole."""
    frame = source.height * source.width * 3
    return source.data + source.data[-frame:] * (len(plan.frames) - source.frames)


async def _in_thread(work: Callable[..., T], *args: Any) -> T:
    """Runs `work` in a thread, and does not leave before it has ended: it may be writing to leased memory."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
