"""What is done for one item, in order: header, decode, room, worker, rows. It knows nothing of who asked.

Everything leased is held in `with` blocks, so that it comes back on every path.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from common.arena import Range, SharedBuffer
from common.media.item import Embedding, Header, Modality, Pixels
from common.tasks import in_thread, wait_until_done
from common.wire import RowLayout
from encoder_service.engine.dispatch import Dispatcher
from encoder_service.engine.embedding_store import EmbeddingStore, Entry
from encoder_service.engine.flight import Flight
from encoder_service.engine.pieces import Pieces
from encoder_service.engine.progress import Progress
from encoder_service.engine.staging import Staging, StagingLease
from encoder_service.item import Inspection, Plan
from encoder_service.media import embedding, geometry, limits
from encoder_service.media.allowance import Allowance
from encoder_service.media.decoder import DecoderPool
from encoder_service.models.config import ModelConfig

_COPY = 4 << 20
"""Bytes copied at a time, so that a large copy in a thread does not keep the event loop from running."""


class Pipeline:
    """Turns items into entries of the store. `seconds` are totals by stage."""

    def __init__(
        self,
        config: ModelConfig,
        media_limits: limits.MediaLimits,
        layout: RowLayout,
        staging: Staging,
        store: EmbeddingStore,
        decoders: DecoderPool,
        dispatcher: Dispatcher,
        *,
        max_patches: int,
        batch_patches: int,
    ) -> None:
        self.config = config
        self.layout = layout
        self.staging = staging
        self.store = store
        self.dispatcher = dispatcher
        self._limits = media_limits
        self._decoders = decoders
        self._max_patches = max_patches
        self._batch_patches = batch_patches
        self.seconds: defaultdict[str, float] = defaultdict(float)

    async def plan(self, flight: Flight) -> Plan:
        """Sizes and grid from the header alone; raises InvalidInput for what no limit allows, or no memory can hold."""
        plan = await self._plan(flight)
        self.store.check_size(plan.tokens)
        match flight.item.source:
            case Pixels():
                self.staging.check_size(plan.pixel_bytes)
            case bytes() | bytearray() as encoded:
                self.staging.check_size(len(encoded), plan.pixel_bytes)
        return plan

    async def _plan(self, flight: Flight) -> Plan:
        item, config = flight.item, self.config
        video = item.modality is Modality.VIDEO
        match item.source:
            case Embedding() as rows:
                merge, groups = config.image.merge, self._limits.max_frames
                embedding.check(rows, item, self.layout, merge, self._max_patches, groups)
                await in_thread(embedding.check_finite, rows, f"{item.field}.embedding")
                return Plan(rows.grid, rows.count, (), 0, 0, (0, 0), rows.timestamps, rows.seconds_per_grid)
            case Pixels() as pixels:
                plan = geometry.plan_pixels(pixels, config, item.options, video=video)
            case _:
                seen = await self._inspect(flight, video=video)
                if video:
                    limits.check_video(seen, item.field, self._limits)
                    plan = geometry.plan_video(seen, config.video, item.options)
                else:
                    limits.check_picture(seen, item.field, self._limits)
                    plan = geometry.plan_image(seen, config.image, item.options)
        limits.check_plan(plan, item.field, self._limits, self._max_patches)
        return plan

    async def compute(self, flight: Flight, plan: Plan, header: Header) -> Entry:
        """Rows into the store; the entry comes back pinned once. Cancelled, it waits for what a worker has begun on.

        Room is made only once something could be decoded, so that broken media push nothing out of the store.
        """
        if isinstance(source := flight.item.source, Embedding):
            return await self.keep(flight, header, lambda rows: _fill(self.store.buffer, rows, source.data))
        entry: Entry | None = None
        try:
            async with self._decoded(flight, plan) as (pixels, frames):
                entry = await self.keep(flight, header, lambda rows: self._run(flight, plan, pixels, frames, rows))
        except BaseException:
            if entry is not None:  # cancelled while the decode process was at its end: the rows stay, the pin does not
                self.store.unpin(entry.allocation)
            raise
        assert entry is not None, "it is kept, or the reason is raised"
        return entry

    async def keep(self, flight: Flight, header: Header, write: Callable[[Range], Awaitable[None]]) -> Entry:
        """Makes room, has the rows written there, and turns them into an entry."""
        with self.timed(flight, "room"):
            allocation = await self.store.allocate(header.tokens)
        flight.allocation = allocation
        try:
            await write(allocation.span)
        except BaseException:
            flight.allocation = None
            self.store.abandon(allocation)
            raise
        return self.store.commit(allocation, header, flight.item.salt)

    async def _inspect(self, flight: Flight, *, video: bool) -> Inspection:
        source = flight.item.source
        assert isinstance(source, bytes | bytearray)
        with self.timed(flight, "inspect"), await self._decoders.turn(video=video):
            async with self.staging.lease(len(source)) as lease:
                await _fill(self.staging.buffer, lease.ranges[0], source)
                return await self._decoders.inspect(
                    lease.ranges[0],
                    key=flight.key,
                    video=video,
                    field=flight.item.field,
                    allowance=self._allowance(flight),
                )

    def _allowance(self, flight: Flight) -> Allowance:
        flight.allowance = flight.allowance or self._decoders.allowance()
        return flight.allowance

    @asynccontextmanager
    async def _decoded(self, flight: Flight, plan: Plan) -> AsyncIterator[tuple[Range, Progress]]:
        """The decoded pixels' place in the staging arena, once the first are there, and how many frames have come."""
        source, frames = flight.item.source, Progress()
        if isinstance(source, Pixels):
            async with self._room(flight, plan.pixel_bytes) as lease:
                await _fill(self.staging.buffer, lease.ranges[0], *_frames(source, plan))
                frames.advance(len(plan.frames))
                yield lease.ranges[0], frames
            return
        assert isinstance(source, bytes | bytearray)
        with self.timed(flight, "decode"):
            turn = await self._decoders.turn(video=flight.item.modality is Modality.VIDEO)
        with turn:
            async with self._room(flight, len(source), plan.pixel_bytes) as lease:
                decoding = asyncio.create_task(self._decode(flight, plan, lease, source, frames))
                decoding.add_done_callback(frames.follow)
                decoding.add_done_callback(lambda _: turn.end())
                try:
                    await frames.reach(1)
                    yield lease.ranges[1], frames
                finally:
                    decoding.cancel()
                    await wait_until_done(decoding)  # until no process can write to what was leased

    async def _decode(
        self, flight: Flight, plan: Plan, lease: StagingLease, source: bytes | bytearray, frames: Progress
    ) -> int:
        encoded, pixels = lease.ranges
        with self.timed(flight, "decode"):
            await _fill(self.staging.buffer, encoded, source)
            await self._decoders.decode(
                encoded,
                pixels,
                plan,
                key=flight.key,
                video=flight.item.modality is Modality.VIDEO,
                field=flight.item.field,
                on_frames=frames.advance,
                allowance=self._allowance(flight),
            )
        lease.free(encoded)
        return len(plan.frames)

    @asynccontextmanager
    async def _room(self, flight: Flight, *sizes: int) -> AsyncIterator[StagingLease]:
        flight.stage, started = "room", time.perf_counter()
        async with self.staging.lease(*sizes) as lease:
            self._count(flight, "room", time.perf_counter() - started)
            yield lease

    async def _run(self, flight: Flight, plan: Plan, pixels: Range, frames: Progress, rows: Range) -> None:
        """Has the workers compute the rows; returns or raises when no worker can write them any more."""
        submitted = time.perf_counter()
        try:
            await Pieces(self.dispatcher, self.layout, flight, plan, pixels, rows).run(frames, self._batch_patches)
        finally:
            now = time.perf_counter()
            begun = min((unit.started_at for unit in flight.units if unit.started_at), default=now)
            self._count(flight, "queue", begun - submitted)
            preprocess = min(sum(unit.preprocess for unit in flight.units), now - begun)
            self._count(flight, "preprocess", preprocess)
            self._count(flight, "vit", now - begun - preprocess)

    @contextmanager
    def timed(self, flight: Flight, name: str) -> Iterator[None]:
        started, flight.stage = time.perf_counter(), name
        try:
            yield
        finally:
            self._count(flight, name, time.perf_counter() - started)

    def _count(self, flight: Flight, name: str, seconds: float) -> None:
        flight.timings[name] = flight.timings.get(name, 0.0) + seconds
        self.seconds[name] += seconds


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
