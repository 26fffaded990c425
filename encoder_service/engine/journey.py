"""How a flight comes by its rows: from the shared tier where they are there, else by computing them.

find in the tier ──found──► load ──► entry
  │ not there                 │ lost on the way (what is known by its key alone is fetched again, if it has an address)
  ▼                           ▼
plan ──► header ──► someone wants rows ──► our turn ──► compute ──► entry, offered to the tier
                                              └─ another replica was faster ──► load
"""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack

from common.arena import Range
from common.errors import MEDIA_CHANGED, NotFound, TwinlensError, Unavailable
from common.media.item import Embedding, Header, Key
from encoder_service.engine.embedding_store import Entry
from encoder_service.engine.flight import Flight
from encoder_service.engine.pipeline import Pipeline
from encoder_service.engine.shared_tier import SharedTier, TierMiss
from encoder_service.item import Plan


class Journey:
    """Settles headers of flights and brings their entries. `counts` are the engine's; `tier` is None for none."""

    def __init__(self, pipeline: Pipeline, tier: SharedTier | None, counts: Counter[str]) -> None:
        self._pipeline = pipeline
        self._tier = tier
        self._counts = counts

    async def go(self, flight: Flight) -> Entry:
        """The entry of a flight, pinned once. Raises the item's error; NotFound for a key that no tier has."""
        tier = None if isinstance(flight.item.source, Embedding) else self._tier
        if tier is not None and (entry := await self._look(flight, tier)) is not None:
            return entry
        if isinstance(flight.item.source, Key):  # no one who has the content came while we looked
            await self._bring(flight)
        if not isinstance(flight.item.source, Embedding):  # for which no worker is needed
            self._pipeline.dispatcher.check(flight.key)
        plan = await self._pipeline.plan(flight)
        header = _header(flight, plan)
        if not flight.header.done():
            flight.header.set_result(header)
        elif flight.header.result() != header:  # it was told as another replica had it
            raise Unavailable("the rows that were told of are lost, and ours are others", reason=MEDIA_CHANGED)
        await flight.wanted.wait()
        if tier is None:
            return await self._compute(flight, plan, header)
        return await self._take_turn(flight, tier, plan, header)

    async def _bring(self, flight: Flight) -> None:
        """The content of a key that nobody has given. Only where its rows were told of, and are lost, is it fetched for
        whoever was told: before that, those who know an address fetch it for themselves."""
        if flight.bring is None or not flight.header.done():
            raise not_found(f"{flight.item.field}.key")
        try:
            with self._pipeline.timed(flight, "fetch"):
                brought = await flight.bring(flight.item.field)
        except TwinlensError:
            if isinstance(flight.item.source, Key):
                raise
        else:
            if isinstance(flight.item.source, Key):  # still no one who has the content came
                flight.item = brought

    async def _look(self, flight: Flight, tier: SharedTier) -> Entry | None:
        with self._pipeline.timed(flight, "shared"):
            header = await tier.find(flight.key, flight.item.salt)
        if header is None or header.modality is not flight.item.modality:
            return None
        flight.found = True
        flight.header.set_result(header)
        await flight.wanted.wait()
        return await self._load(flight, tier, header)

    async def _take_turn(self, flight: Flight, tier: SharedTier, plan: Plan, header: Header) -> Entry:
        async with AsyncExitStack() as held:
            with self._pipeline.timed(flight, "shared"):
                lock = await held.enter_async_context(tier.lock(flight.key, flight.item.salt))
            if lock.found == header and (entry := await self._load(flight, tier, header)) is not None:
                return entry
            lock.entry = await self._compute(flight, plan, header)
            return lock.entry

    async def _load(self, flight: Flight, tier: SharedTier, header: Header) -> Entry | None:
        async def write(rows: Range) -> None:
            with self._pipeline.timed(flight, "shared"):
                await tier.load(header, self._pipeline.store.buffer.slice(rows))

        try:
            entry = await self._pipeline.keep(flight, header, write)
        except TierMiss:
            flight.found = False
            return None
        self._counts["hits"] += 1
        return entry

    async def _compute(self, flight: Flight, plan: Plan, header: Header) -> Entry:
        given = isinstance(flight.item.source, Embedding)  # of which nothing is left to be computed
        self._counts["misses"] += not given
        entry = await self._pipeline.compute(flight, plan, header)
        self._counts["encoded"] += not given
        return entry


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
