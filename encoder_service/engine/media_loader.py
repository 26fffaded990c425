"""From an item's content to its plan, and to its pixels in the staging arena, where workers read them.

Everything leased is held in `with` blocks, so it is given back on every path.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Protocol

from common.aio.tasks import in_thread, wait_until_done
from common.errors import InvalidInput, Unsupported
from common.media.item import Embedding, Grid, Modality, Options, Pixels
from common.rows.wire import RowLayout
from common.shm.arena import Range, SharedBuffer
from encoder_service.engine.embedding_store import EmbeddingStore
from encoder_service.engine.flight import Flight
from encoder_service.engine.progress import Progress
from encoder_service.engine.pruning import pruned
from encoder_service.engine.staging import Staging, StagingLease
from encoder_service.families.family import ModelConfig
from encoder_service.item import Footage, Inspection, Item, Plan, Pruning
from encoder_service.media import checks, limits
from encoder_service.media.decoder import DecoderPool, TimeBudget
from encoder_service.media.modalities import SPECS

_COPY = 4 << 20
"""Bytes copied at a time, so that a large copy in a thread does not keep the event loop from running."""


class Planner(Protocol):
    """Computes plans of models without a family (`media.planner`)."""

    async def footage(self, item: Item, seen: Inspection) -> Footage:
        """The frames to take of a video. Raises as `plan`."""
        ...

    async def plan(self, item: Item, seen: Inspection, footage: Footage | None) -> Plan:
        """The plan of an item of that size, and of a video with these frames. Raises InvalidInput if the model does not
        take it."""
        ...


class MediaLoader:
    """Has decode processes inspect and decode items. All jobs of an item share one `time_budget`."""

    def __init__(
        self,
        plans: ModelConfig | Planner,
        media_limits: limits.MediaLimits,
        layout: RowLayout,
        staging: Staging,
        store: EmbeddingStore,
        decoders: DecoderPool,
        *,
        max_patches: int,
    ) -> None:
        self._plans = plans
        self.layout = layout
        self.staging = staging
        self._store = store
        self._limits = media_limits
        self.decoders = decoders
        self._max_patches = max_patches

    def time_budget(self) -> TimeBudget:
        """The decode processes' time that one item has."""
        return self.decoders.time_budget()

    async def plan(self, flight: Flight, time_budget: TimeBudget) -> Plan:
        """Computes sizes and grid from the file's header; raises InvalidInput if a limit is exceeded, or neither the
        staging arena nor the store could ever hold it."""
        if isinstance(self._plans, ModelConfig):
            plan = await self._plan_by_family(flight, self._plans, time_budget)
        else:
            plan = await self._plan_by_hf(flight, self._plans, time_budget)
        self._store.check_size(plan.tokens)
        match flight.item.source:
            case Pixels():
                self.staging.check_size(plan.pixel_bytes)
            case bytes() | bytearray() as encoded:
                self.staging.check_size(len(encoded), plan.pixel_bytes)
        return plan

    async def _plan_by_family(self, flight: Flight, model: ModelConfig, time_budget: TimeBudget) -> Plan:
        item, spec = flight.item, SPECS[flight.item.modality]
        if item.options.with_sound:
            raise checks.no_video_sound(item.field)
        processor = model.processors[item.modality]
        planned: Callable[[Options], Plan]
        match item.source:
            case Embedding() as rows:
                squares = processor.rows(rows.grid)
                checks.check_rows(rows, item, self.layout, squares, self._max_patches, self._limits)
                await in_thread(checks.check_finite, rows, f"{item.field}.embedding")
                return _plan_of_rows(rows, squares)
            case Pixels() as pixels:
                planned = partial(processor.plan_pixels, pixels)
            case _:
                seen = await self._inspect(flight, time_budget)
                spec.check(seen, item.field, self._limits)
                checks.check_listed(seen, item)
                planned = (
                    partial(processor.plan_pixels, seen.as_given) if seen.listed else partial(processor.plan, seen)
                )
        try:
            plan = planned(item.options)
        except InvalidInput as error:
            raise error.at(item.field) from None
        if not isinstance(item.source, Pixels):
            plan = limits.fitted(plan, self._limits)
        limits.check_plan(plan, item.field, self._limits, self._max_patches)
        return pruned(plan, item.options, processor.merge, item.field)

    async def _plan_by_hf(self, flight: Flight, planner: Planner, time_budget: TimeBudget) -> Plan:
        item = flight.item
        match item.source:
            case Embedding():
                why = "rows computed elsewhere do not say which tokens stand for them in this model's prompts"
                raise Unsupported(why, reason="NO_EMBEDDINGS", field=f"{item.field}.embedding")
            case Pixels() as pixels:
                seen = Inspection(pixels.width, pixels.height)
                footage = Footage.of(pixels) if item.modality is Modality.VIDEO else None
            case _:
                seen = await self._inspect(flight, time_budget)
                SPECS[item.modality].check(seen, item.field, self._limits)
                checks.check_listed(seen, item)
                footage = None
                if item.modality is Modality.VIDEO:
                    footage = Footage.of(seen.as_given) if seen.listed else await planner.footage(item, seen)
        if footage is not None:  # before the planner computes with that many
            whole = (seen.height, seen.width)
            blank = Plan(Grid(1, 1, 1), 1, footage.decoded, *whole, whole)
            limits.check_plan(blank, item.field, self._limits, self._max_patches)
        plan = await planner.plan(item, seen, footage)
        limits.check_plan(plan, item.field, self._limits, self._max_patches)
        return plan

    async def _inspect(self, flight: Flight, time_budget: TimeBudget) -> Inspection:
        source = flight.item.source
        assert isinstance(source, bytes | bytearray)
        turn = self.decoders.turn(flight.item.modality, len(source), flight.item.caller)
        with flight.times.timed("inspect"), await turn:
            async with self.staging.lease(len(source)) as lease:
                await fill(self.staging.buffer, lease.ranges[0], source)
                return await self.decoders.inspect(
                    lease.ranges[0],
                    key=flight.key,
                    modality=flight.item.modality,
                    field=flight.item.field,
                    time_budget=time_budget,
                    with_sound=bool(flight.item.options.with_sound),
                )

    @asynccontextmanager
    async def decoded(
        self, flight: Flight, plan: Plan, time_budget: TimeBudget
    ) -> AsyncIterator[tuple[Range, Progress]]:
        """The decoded pixels' place in the staging arena, once the first frames are there, and the number of frames so
        far."""
        source, frames = flight.item.source, Progress()
        if isinstance(source, Pixels):
            async with self._room(flight, plan.pixel_bytes) as lease:
                await fill(self.staging.buffer, lease.ranges[0], *_frames(source, plan))
                frames.advance(len(plan.frames))
                yield lease.ranges[0], frames
            return
        assert isinstance(source, bytes | bytearray)
        with flight.times.timed("decode"):
            turn = await self.decoders.turn(flight.item.modality, len(source), flight.item.caller)
        with turn:
            async with self._room(flight, len(source), plan.pixel_bytes) as lease:
                encoded, pixels = lease.ranges

                async def decode() -> int:
                    with flight.times.timed("decode"):
                        await fill(self.staging.buffer, encoded, source)
                        await self.decoders.decode(
                            encoded,
                            pixels,
                            plan,
                            key=flight.key,
                            modality=flight.item.modality,
                            field=flight.item.field,
                            on_frames=frames.advance,
                            time_budget=time_budget,
                        )
                    lease.free(encoded)
                    return len(plan.frames)

                decoding = asyncio.create_task(decode())
                decoding.add_done_callback(frames.follow)
                decoding.add_done_callback(lambda _: turn.close())
                try:
                    await frames.reach(1)
                    yield pixels, frames
                finally:
                    decoding.cancel()
                    await wait_until_done(decoding)  # until no process can write to the leased ranges

    @asynccontextmanager
    async def _room(self, flight: Flight, *sizes: int) -> AsyncIterator[StagingLease]:
        async with AsyncExitStack() as held:
            with flight.times.timed("room"):
                lease = await held.enter_async_context(self.staging.lease(*sizes))
            yield lease


def _plan_of_rows(rows: Embedding, squares: int) -> Plan:
    """The plan of precomputed rows with so many squares, pruned if they say so."""
    pruning = Pruning(rows.count, rows.kept_rows) if rows.count < squares else None
    return Plan(rows.grid, squares, (), 0, 0, (0, 0), rows.timestamps, rows.seconds_per_grid, pruning)


def _frames(source: Pixels, plan: Plan) -> list[memoryview]:
    """The plan's frames, in place; the last one is repeated to fill the last frame group."""
    data, frame = memoryview(source.data), source.height * source.width * 3
    return [data, *[data[-frame:]] * (len(plan.frames) - source.frames)]


async def fill(buffer: SharedBuffer, span: Range, *parts: bytes | bytearray | memoryview) -> None:
    """Copies parts, one after the other, to a range of their total size; large ones in a thread."""
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
