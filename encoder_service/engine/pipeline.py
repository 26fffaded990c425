"""The steps for one item, in order: shared store, header, pixels, room, workers, rows."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from common.aio.tasks import in_thread, wait_until_done
from common.errors import MEDIA_CHANGED, NotFound, TwinlensError, Unavailable
from common.media.item import Embedding, Header, Key
from common.rows.wire import RowLayout
from common.shm.arena import Range
from common.telemetry.stages import Stage
from encoder_service.engine import pruning
from encoder_service.engine.batching import Unit, cut
from encoder_service.engine.content import Contents
from encoder_service.engine.dispatch import Dispatcher
from encoder_service.engine.embedding_store import Allocation, EmbeddingStore, Entry
from encoder_service.engine.flight import Flight
from encoder_service.engine.load import ItemTotals
from encoder_service.engine.media_loader import MediaLoader, fill
from encoder_service.engine.progress import Progress
from encoder_service.engine.shared_store import SharedStore, SharedStoreMiss
from encoder_service.item import Plan
from encoder_service.media.decoder import TimeBudget
from encoder_service.worker.messages import Piece

_WORTH_CUTTING = 2048
"""A run of frame groups with fewer patches is not worth a worker, or an early start, of its own."""


class Pipeline:
    """Turns items into entries of the store. `totals` are those of items since start, `seconds` by stage."""

    def __init__(
        self,
        media: MediaLoader,
        store: EmbeddingStore,
        dispatcher: Dispatcher,
        contents: Contents,
        layout: RowLayout,
        shared_store: SharedStore | None = None,
    ) -> None:
        self.media = media
        self.layout = layout
        self.store = store
        self.dispatcher = dispatcher
        self.contents = contents
        self.shared_store = shared_store
        self.totals = ItemTotals()
        self.seconds: dict[str, float] = {}

    async def run(self, flight: Flight) -> Entry:
        """The entry of an item, pinned once. Raises the item's error; NotFound for a key that no store has.

        If cancelled, it waits for work that a worker has begun.
        """
        shared_store = None if isinstance(flight.item.source, Embedding) else self.shared_store
        # 1. Another replica may have it: then its rows are loaded, unless they are lost on the way.
        if shared_store is not None and (entry := await self._find(flight, shared_store)) is not None:
            return entry
        # 2. For a key without content, which no caller has brought meanwhile, the content is fetched.
        if isinstance(flight.item.source, Key):
            await self._fetch(flight)
        # 3. The content shows what the item is. Precomputed rows need no worker.
        if not isinstance(flight.item.source, Embedding):
            self.dispatcher.check(flight.key)
        time_budget = self.media.time_budget()
        plan = await self.media.plan(flight, time_budget)
        header = flight.header_known(_header(flight, plan))
        # 4. Nothing is computed for callers who only want the header.
        await flight.wanted.wait()
        if shared_store is None:
            return await self._compute(flight, plan, header, time_budget)
        # 5. One replica computes, and offers the entry to the others; those that waited for it load it.
        async with AsyncExitStack() as held:
            with flight.times.timed("shared"):
                lock = await held.enter_async_context(shared_store.lock(flight.key, flight.item.salt))
            found = lock.found
            if found is not None and found.agrees(header) and (entry := await self._load(flight, shared_store, found)):
                return entry
            entry = await self._compute(flight, plan, header, time_budget)
            lock.computed = True
            return entry

    async def _find(self, flight: Flight, shared_store: SharedStore) -> Entry | None:
        with flight.times.timed("shared"):
            header = await shared_store.find(flight.key, flight.item.salt)
        if header is None or header.modality is not flight.item.modality:
            return None
        flight.header_known(header, from_shared_store=True)
        await flight.wanted.wait()
        return await self._load(flight, shared_store, header)

    async def _load(self, flight: Flight, shared_store: SharedStore, header: Header) -> Entry | None:
        try:
            async with self._allocated(flight, header.tokens) as allocation:
                with flight.times.timed("shared"):
                    await shared_store.load(header, self.store.buffer.slice(allocation.span))
                entry = self.store.commit(allocation, header, flight.item.salt)
        except SharedStoreMiss:
            return None
        self.totals.hits += 1
        return entry

    async def _fetch(self, flight: Flight) -> None:
        """Fetches the content of a key that nobody has brought. This is only done if callers were promised its rows and
        these are lost; otherwise callers who know an address fetch it for themselves."""
        ticket, field = flight.address, flight.item.field
        if ticket is None or not flight.header.done():
            raise not_found(f"{field}.key")
        try:
            wanted = dataclasses.replace(ticket.item, field=field)
            own = None if ticket.flight is None else ticket.reservation
            with flight.times.timed("fetch"):
                async with self.contents.fetched(wanted, own) as (item, room):
                    if await self.contents.key(item) != flight.key:
                        raise Unavailable(
                            "the address returns other media than before", reason=MEDIA_CHANGED, field=field
                        )
                    if isinstance(flight.item.source, Key):
                        room.resize(item.size)
                        flight.take_room(room)
                        flight.content_came(item)
        except TwinlensError:
            if isinstance(flight.item.source, Key):  # still nobody has brought the content
                raise

    async def _compute(self, flight: Flight, plan: Plan, header: Header, time_budget: TimeBudget) -> Entry:
        """Computes rows into the store. Room there is only allocated once something could be decoded, so that broken
        media evict nothing."""
        source, salt = flight.item.source, flight.item.salt
        if isinstance(source, Embedding):  # precomputed: nothing to compute
            async with self._allocated(flight, header.tokens) as rows:
                await fill(self.store.buffer, rows.span, source.data)
                return self.store.commit(rows, header, salt)
        self.totals.misses += 1
        entry: Entry | None = None
        try:
            async with (
                self.media.decoded(flight, plan, time_budget) as (pixels, frames),
                self._allocated(flight, plan.tokens) as rows,
            ):
                await self._run_units(flight, plan, pixels, frames, rows.span)
                if plan.pruning is not None:
                    header = await self._prune(flight, plan, header, rows)
                entry = self.store.commit(rows, header, salt)
        except BaseException:
            if entry is not None:  # cancelled while the decode process was at its end: the rows stay, the pin does not
                self.store.unpin(entry.allocation)
            raise
        assert entry is not None, "it is kept, or the reason is raised"
        self.totals.encoded += 1
        return entry

    @asynccontextmanager
    async def _allocated(self, flight: Flight, tokens: int) -> AsyncIterator[Allocation]:
        """Room in the store; the context commits it once rows are written there."""
        with flight.times.timed("room"):
            allocation = await self.store.allocate(tokens)
        flight.allocated(allocation)
        try:
            yield allocation
        except BaseException:
            flight.rows_lost()
            self.store.abandon(allocation)
            raise

    async def _prune(self, flight: Flight, plan: Plan, header: Header, rows: Allocation) -> Header:
        """Drops pruned rows and frees their room; returns the header with the kept ones. Callers may have been told of
        these by a shared store that has lost them since."""
        assert plan.pruning is not None
        data = self.store.buffer.slice(rows.span)
        with flight.times.timed("prune"):
            kept = plan.pruning.kept_rows or header.kept_rows
            kept = kept or await in_thread(pruning.choose, data, plan.grid.t, plan.kept, self.layout)
            await in_thread(pruning.compact, data, kept, self.layout.row_bytes)
        self.store.trim(rows, plan.kept)
        return dataclasses.replace(header, kept_rows=kept)

    async def _run_units(self, flight: Flight, plan: Plan, pixels: Range, frames: Progress, rows: Range) -> None:
        """Has the workers compute the rows; returns or raises when no worker can write them any more."""
        submitted = time.perf_counter()
        try:
            work = _ItemWork(self.dispatcher, flight, plan, pixels, rows, self.layout.row_bytes)
            await work.run(frames)
        finally:
            now = time.perf_counter()
            for name, stage in _stages_of(flight.units, submitted, now).items():
                flight.times.add(name, stage)


def _stages_of(units: Sequence[Unit], submitted: float, now: float) -> dict[str, Stage]:
    """The stages from the submission of the first unit until now, when the last one has ended. While a worker
    preprocesses a unit, it computes none."""
    started = [unit for unit in units if unit.started_at]
    first = min(started, key=lambda unit: unit.started_at, default=None)
    if first is None:
        return {"queue": Stage.between(submitted, now), "preprocess": Stage(0.0), "vit": Stage(0.0)}
    preprocess = min(sum(unit.preprocess for unit in started), now - first.started_at)
    prepared = min(max(unit.started_at + unit.preprocess for unit in started), now)
    computed = min(first.started_at + first.preprocess, now)
    return {
        "queue": Stage.between(submitted, first.started_at),
        "preprocess": Stage(preprocess, first.started_at, prepared),
        "vit": Stage(now - first.started_at - preprocess, computed, now),
    }


@dataclass(frozen=True, slots=True)
class _ItemWork:
    """One item's work for the device workers, divided at frame groups: `pixels` is where its frames are, or will be,
    and `rows` where its rows go."""

    dispatcher: Dispatcher
    flight: Flight
    plan: Plan
    pixels: Range
    rows: Range
    row_bytes: int

    @property
    def frames_per_group(self) -> int:
        return len(self.plan.frames) // self.plan.grid.t

    async def run(self, frames: Progress) -> None:
        """Has each piece computed once its frames are there; ends only when no worker can write rows any more.

        The first piece that fails cancels the others.
        """
        cuts = self._cut(frames)
        self.flight.cut(len(cuts))
        try:
            async with asyncio.TaskGroup() as pieces:
                for first, end in cuts:
                    await frames.reach(end * self.frames_per_group)
                    pieces.create_task(self._compute(first, end))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    def _cut(self, frames: Progress) -> list[tuple[int, int]]:
        """Runs of frame groups [first, end), each for one pass. They are smaller if frames are still to come, so that
        work can begin early; waiting ones still go to a worker in one batch."""
        coming, budget = frames.count < len(self.plan.frames), self.dispatcher.pass_patches
        budget = min(budget, _WORTH_CUTTING) if coming else budget
        return cut(self.plan.grid, budget, self.dispatcher.alive, _WORTH_CUTTING)

    async def _compute(self, first: int, end: int) -> None:
        """Has a worker compute frame groups [first, end). Cancelled, it waits for one that has begun."""
        flight, grid = self.flight, self.plan.grid
        patches = (end - first) * grid.h * grid.w
        whole = self.plan.pruning is None
        piece = self._piece(first, end)
        unit = self.dispatcher.submit(flight.key, piece, patches, flight.priority, first, pooled=whole)
        flight.submitted(unit)
        try:
            await asyncio.wait({unit.done})
        except asyncio.CancelledError:
            if not self.dispatcher.withdraw(unit):
                await wait_until_done(asyncio.gather(unit.done, return_exceptions=True))
            raise
        unit.done.result()
        if whole:  # otherwise no row is read before the kept ones are in place
            flight.unit_done(unit, first * self.plan.tokens // grid.t)

    def _piece(self, first: int, end: int) -> Piece:
        """Frame groups [first, end)."""
        plan = self.plan
        tokens = plan.tokens // plan.grid.t
        return Piece(
            modality=self.flight.item.modality.value,
            pixels=self.pixels.offset + plan.sound_bytes + first * self.frames_per_group * plan.frame_bytes,
            frames=(end - first) * self.frames_per_group,
            height=plan.height,
            width=plan.width,
            depth=plan.depth,
            resized=plan.resized,
            grid=(end - first, plan.grid.h, plan.grid.w),
            tokens=(end - first) * tokens,
            rows=self.rows.offset + first * tokens * self.row_bytes,
            sound=self.pixels.offset,
            samples=plan.samples,
            turns=list(plan.turns),
        )


def not_found(field: str) -> NotFound:
    """The same error for another tenant's key and for an unknown one."""
    return NotFound("no such key is in the store", reason="KEY_NOT_FOUND", field=field)


def _header(flight: Flight, plan: Plan) -> Header:
    return Header(
        key=flight.key,
        modality=flight.item.modality,
        grid=plan.grid,
        tokens=plan.kept,
        timestamps=plan.timestamps,
        seconds_per_grid=plan.seconds_per_grid,
        grid_rows=plan.tokens if plan.pruning else 0,
        kept_rows=plan.pruning.kept_rows if plan.pruning else b"",
        replacement=plan.replacement,
    )
