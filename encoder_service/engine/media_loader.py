"""From an item's content to its plan, and to its pixels in the staging arena, where workers read them.

Everything leased is held in `with` blocks, so it is given back on every path.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from common.aio.tasks import in_thread, wait_until_done
from common.media.item import Pixels
from common.shm.arena import Range, SharedBuffer
from encoder_service.engine.embedding_store import EmbeddingStore
from encoder_service.engine.flight import Flight
from encoder_service.engine.item_plans import ItemPlans
from encoder_service.engine.progress import Progress
from encoder_service.engine.staging import Staging, StagingLease
from encoder_service.item import Inspection, Plan
from encoder_service.media.decoder import DecoderPool, TimeBudget

_COPY = 4 << 20
"""Bytes copied at a time, so that a large copy in a thread does not keep the event loop from running."""


class MediaLoader:
    """Has decode processes inspect and decode items. All jobs of an item share one `time_budget`."""

    def __init__(self, plans: ItemPlans, staging: Staging, store: EmbeddingStore, decoders: DecoderPool) -> None:
        self._plans = plans
        self.staging = staging
        self._store = store
        self.decoders = decoders

    def time_budget(self) -> TimeBudget:
        """The decode processes' time that one item has."""
        return self.decoders.time_budget()

    async def plan(self, flight: Flight, time_budget: TimeBudget) -> Plan:
        """The plan of an item. Raises as `ItemPlans.plan`, and InvalidInput if the staging arena or the store could
        never hold it."""
        plan = await self._plans.plan(flight.item, partial(self._inspect, flight, time_budget))
        self._store.check_size(plan.tokens)
        match flight.item.source:
            case Pixels():
                self.staging.check_size(plan.pixel_bytes)
            case bytes() | bytearray() as encoded:
                self.staging.check_size(len(encoded), plan.pixel_bytes)
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
