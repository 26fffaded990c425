"""What is done for one item, in order: shared tier, header, decode, room, worker, rows. It knows nothing of who asked.

Everything leased is held in `with` blocks, so that it comes back on every path.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from common.arena import Range, SharedBuffer
from common.errors import MEDIA_CHANGED, NotFound, TwinlensError, Unavailable
from common.media.item import Embedding, Header, Key, Pixels
from common.tasks import in_thread, wait_until_done
from common.wire import RowLayout
from encoder_service.engine.content import Contents
from encoder_service.engine.dispatch import Dispatcher
from encoder_service.engine.embedding_store import Allocation, EmbeddingStore, Entry
from encoder_service.engine.flight import Flight
from encoder_service.engine.pieces import Pieces
from encoder_service.engine.progress import Progress
from encoder_service.engine.shared_tier import SharedTier, TierMiss
from encoder_service.engine.staging import Staging, StagingLease
from encoder_service.families.family import ModelConfig
from encoder_service.item import Inspection, Plan
from encoder_service.media import embedding, limits
from encoder_service.media.allowance import Allowance
from encoder_service.media.decoder import DecoderPool
from encoder_service.media.modalities import SPECS

_COPY = 4 << 20
"""Bytes copied at a time, so that a large copy in a thread does not keep the event loop from running."""


class Pipeline:
    """Turns items into entries of the store. `counts` are totals since start, `seconds` totals by stage."""

    def __init__(
        self,
        config: ModelConfig,
        media_limits: limits.MediaLimits,
        layout: RowLayout,
        staging: Staging,
        store: EmbeddingStore,
        decoders: DecoderPool,
        dispatcher: Dispatcher,
        contents: Contents,
        tier: SharedTier | None = None,
        *,
        max_patches: int,
        batch_patches: int,
    ) -> None:
        self.config = config
        self.layout = layout
        self.staging = staging
        self.store = store
        self.dispatcher = dispatcher
        self.contents = contents
        self.tier = tier
        self._limits = media_limits
        self._decoders = decoders
        self._max_patches = max_patches
        self._batch_patches = batch_patches
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}

    async def run(self, flight: Flight) -> Entry:
        """The entry of an item, pinned once. Raises the item's error; NotFound for a key that no tier has.

        Cancelled, it waits for what a worker has begun on.
        """
        tier = None if isinstance(flight.item.source, Embedding) else self.tier
        # 1. Another replica may have it: then its rows are loaded, unless they are lost on the way.
        if tier is not None and (entry := await self._find(flight, tier)) is not None:
            return entry
        # 2. Of a key alone, for which no one who has the content came while we looked, the content is fetched.
        if isinstance(flight.item.source, Key):
            await self._fetch(flight)
        # 3. The content says what it is. Ready-made rows need no worker.
        if not isinstance(flight.item.source, Embedding):
            self.dispatcher.check(flight.key)
        allowance = self._decoders.allowance()
        plan = await self._plan(flight, allowance)
        header = _header(flight, plan)
        flight.header_known(header)
        # 4. Nothing is computed for callers who want the header alone.
        await flight.wanted.wait()
        if tier is None:
            return await self.compute(flight, plan, header, allowance)
        # 5. One replica computes, and offers the entry to the others; who waited for it loads it.
        async with AsyncExitStack() as held:
            with flight.times.timed("shared"):
                lock = await held.enter_async_context(tier.lock(flight.key, flight.item.salt))
            if lock.found == header and (entry := await self._load(flight, tier, header)) is not None:
                return entry
            lock.entry = await self.compute(flight, plan, header, allowance)
            return lock.entry

    async def _find(self, flight: Flight, tier: SharedTier) -> Entry | None:
        with flight.times.timed("shared"):
            header = await tier.find(flight.key, flight.item.salt)
        if header is None or header.modality is not flight.item.modality:
            return None
        flight.header_known(header, from_tier=True)
        await flight.wanted.wait()
        return await self._load(flight, tier, header)

    async def _load(self, flight: Flight, tier: SharedTier, header: Header) -> Entry | None:
        try:
            async with self._allocated(flight, header) as allocation:
                with flight.times.timed("shared"):
                    await tier.load(header, self.store.buffer.slice(allocation.span))
                entry = self.store.commit(allocation, header, flight.item.salt)
        except TierMiss:
            return None
        self.counts["hits"] += 1
        return entry

    async def _fetch(self, flight: Flight) -> None:
        """The content of a key that nobody has given. Only where its rows were told of, and are lost, is it fetched for
        whoever was told: before that, those who know an address fetch it for themselves."""
        ticket, field = flight.address, flight.item.field
        if ticket is None or not flight.header.done():
            raise not_found(f"{field}.key")
        try:
            with flight.times.timed("fetch"):
                item = await self.contents.fetched(dataclasses.replace(ticket.item, field=field), ticket.mime_type)
                if await self.contents.key(item) != flight.key:
                    raise Unavailable("an address gives other media than before", reason=MEDIA_CHANGED, field=field)
                if ticket.flight is not None:  # its caller is still there
                    ticket.reservation.resize(item.size)
        except TwinlensError:
            if isinstance(flight.item.source, Key):  # still no one who has the content came
                raise
        else:
            flight.content_came(item)

    async def compute(self, flight: Flight, plan: Plan, header: Header, allowance: Allowance) -> Entry:
        """Rows into the store. Room is made there only once something could be decoded, so that broken media push
        nothing out."""
        source, salt = flight.item.source, flight.item.salt
        if isinstance(source, Embedding):  # of which nothing is left to be computed
            async with self._allocated(flight, header) as rows:
                await _fill(self.store.buffer, rows.span, source.data)
                return self.store.commit(rows, header, salt)
        self.counts["misses"] += 1
        entry: Entry | None = None
        try:
            async with (
                self._decoded(flight, plan, allowance) as (pixels, frames),
                self._allocated(flight, header) as rows,
            ):
                await self._run_units(flight, plan, pixels, frames, rows.span)
                entry = self.store.commit(rows, header, salt)
        except BaseException:
            if entry is not None:  # cancelled while the decode process was at its end: the rows stay, the pin does not
                self.store.unpin(entry.allocation)
            raise
        assert entry is not None, "it is kept, or the reason is raised"
        self.counts["encoded"] += 1
        return entry

    @asynccontextmanager
    async def _allocated(self, flight: Flight, header: Header) -> AsyncIterator[Allocation]:
        """Room in the store, which the block commits once rows are written there."""
        with flight.times.timed("room"):
            allocation = await self.store.allocate(header.tokens)
        flight.allocated(allocation)
        try:
            yield allocation
        except BaseException:
            flight.rows_lost()
            self.store.abandon(allocation)
            raise

    async def _run_units(self, flight: Flight, plan: Plan, pixels: Range, frames: Progress, rows: Range) -> None:
        """Has the workers compute the rows; returns or raises when no worker can write them any more."""
        submitted = time.perf_counter()
        try:
            await Pieces(self.dispatcher, self.layout, flight, plan, pixels, rows).run(frames, self._batch_patches)
        finally:
            now = time.perf_counter()
            begun = min((unit.started_at for unit in flight.units if unit.started_at), default=now)
            preprocess = min(sum(unit.preprocess for unit in flight.units), now - begun)
            flight.times.add("queue", begun - submitted)
            flight.times.add("preprocess", preprocess)
            flight.times.add("vit", now - begun - preprocess)

    async def _plan(self, flight: Flight, allowance: Allowance) -> Plan:
        """Sizes and grid from the header alone; raises InvalidInput for what no limit allows, or no memory can hold."""
        plan = await self._planned(flight, allowance)
        self.store.check_size(plan.tokens)
        match flight.item.source:
            case Pixels():
                self.staging.check_size(plan.pixel_bytes)
            case bytes() | bytearray() as encoded:
                self.staging.check_size(len(encoded), plan.pixel_bytes)
        return plan

    async def _planned(self, flight: Flight, allowance: Allowance) -> Plan:
        item, config, spec = flight.item, self.config, SPECS[flight.item.modality]
        match item.source:
            case Embedding() as rows:
                embedding.check(rows, item, self.layout, config.image.merge, self._max_patches, self._limits)
                await in_thread(embedding.check_finite, rows, f"{item.field}.embedding")
                return Plan(rows.grid, rows.count, (), 0, 0, (0, 0), rows.timestamps, rows.seconds_per_grid)
            case Pixels() as pixels:
                plan = spec.plan_pixels(pixels, config, item.options)
            case _:
                seen = await self._inspect(flight, allowance)
                spec.check(seen, item.field, self._limits)
                plan = spec.plan(seen, config, item.options)
        limits.check_plan(plan, item.field, self._limits, self._max_patches)
        return plan

    async def _inspect(self, flight: Flight, allowance: Allowance) -> Inspection:
        source = flight.item.source
        assert isinstance(source, bytes | bytearray)
        with flight.times.timed("inspect"), await self._decoders.turn(flight.item.modality):
            async with self.staging.lease(len(source)) as lease:
                await _fill(self.staging.buffer, lease.ranges[0], source)
                return await self._decoders.inspect(
                    lease.ranges[0],
                    key=flight.key,
                    modality=flight.item.modality,
                    field=flight.item.field,
                    allowance=allowance,
                )

    @asynccontextmanager
    async def _decoded(self, flight: Flight, plan: Plan, allowance: Allowance) -> AsyncIterator[tuple[Range, Progress]]:
        """The decoded pixels' place in the staging arena, once the first are there, and how many frames have come."""
        source, frames = flight.item.source, Progress()
        if isinstance(source, Pixels):
            async with self._room(flight, plan.pixel_bytes) as lease:
                await _fill(self.staging.buffer, lease.ranges[0], *_frames(source, plan))
                frames.advance(len(plan.frames))
                yield lease.ranges[0], frames
            return
        assert isinstance(source, bytes | bytearray)
        with flight.times.timed("decode"):
            turn = await self._decoders.turn(flight.item.modality)
        with turn:
            async with self._room(flight, len(source), plan.pixel_bytes) as lease:
                decoding = asyncio.create_task(self._decode(flight, plan, allowance, lease, source, frames))
                decoding.add_done_callback(frames.follow)
                decoding.add_done_callback(lambda _: turn.close())
                try:
                    await frames.reach(1)
                    yield lease.ranges[1], frames
                finally:
                    decoding.cancel()
                    await wait_until_done(decoding)  # until no process can write to what was leased

    async def _decode(
        self,
        flight: Flight,
        plan: Plan,
        allowance: Allowance,
        lease: StagingLease,
        source: bytes | bytearray,
        frames: Progress,
    ) -> int:
        encoded, pixels = lease.ranges
        with flight.times.timed("decode"):
            await _fill(self.staging.buffer, encoded, source)
            await self._decoders.decode(
                encoded,
                pixels,
                plan,
                key=flight.key,
                modality=flight.item.modality,
                field=flight.item.field,
                on_frames=frames.advance,
                allowance=allowance,
            )
        lease.free(encoded)
        return len(plan.frames)

    @asynccontextmanager
    async def _room(self, flight: Flight, *sizes: int) -> AsyncIterator[StagingLease]:
        async with AsyncExitStack() as held:
            with flight.times.timed("room"):
                lease = await held.enter_async_context(self.staging.lease(*sizes))
            yield lease


def not_found(field: str) -> NotFound:
    """The one answer to a key of another tenant and to one that is nowhere."""
    return NotFound("no such key is in the store", reason="KEY_NOT_FOUND", field=field)


def _header(flight: Flight, plan: Plan) -> Header:
    return Header(
        key=flight.key,
        modality=flight.item.modality,
        grid=plan.grid,
        tokens=plan.tokens,
        timestamps=plan.timestamps,
        seconds_per_grid=plan.seconds_per_grid,
    )


def _frames(source: Pixels, plan: Plan) -> list[memoryview]:
    """Frames as the plan has them, where they are: the last one again, until the last frame group is whole."""
    data, frame = memoryview(source.data), source.height * source.width * 3
    return [data, *[data[-frame:]] * (len(plan.frames) - source.frames)]


async def _fill(buffer: SharedBuffer, span: Range, *parts: bytes | bytearray | memoryview) -> None:
    """Copies what comes one after the other to a range of its size; much of it in a thread."""
    if span.size <= _COPY:
        _copy(buffer, span, parts)
    else:
        await in_thread(_copy, buffer, span, parts)


def _copy(buffer: SharedBuffer, span: Range, parts: Sequence[bytes | bytearray | memoryview]) -> None:
    target = buffer.slice(span)
    for data in parts:
        part = memoryview(data)
        for start in range(0, len(part), _COPY):
            piece = part[start : start + _COPY]
            target[: len(piece)] = piece
            target = target[len(piece) :]
