"""The items of an `Encode` call, each from its header to its last row, and their events in one stream."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeAlias

from common.aio.merged import Send
from common.errors import TwinlensError, without_traces
from common.media.convert import add_checksum, write_header, write_stages
from common.media.item import Header
from common.telemetry import log, tracing
from common.telemetry.stages import Stage, seconds_of
from encoder_service import convert
from encoder_service.engine.encode import EncoderEngine
from encoder_service.engine.flight import Ticket
from encoder_service.meters import Meters
from encoder_service.transports.base import RowRun
from encoder_service.transports.transports import Transports
from twinlens.v1 import encoder_pb2

Event: TypeAlias = encoder_pb2.EncodeResponse | bytes
"""A message; bytes are one that is serialized already."""
PROGRESS_SECONDS = 1.0
"""A caller hears of a waiting item at least this often."""


@dataclass(slots=True, eq=False)
class Delivery:
    """Delivers the item at `index` of a call, or its error; `request` has everything else. Rows are sent in runs, each
    by the shortest transport open at that time; rows that arrive meanwhile gather for the next run."""

    encoder: EncoderEngine
    transports: Transports
    meters: Meters
    request: encoder_pb2.EncodeRequest
    index: int
    item: convert.ItemOrError
    began: float = field(default_factory=time.perf_counter)
    """When the call came."""
    transfer: Stage = field(default_factory=lambda: Stage(0.0))
    """The time that rows spent in transfer."""
    failure: str = ""
    """The reason of the error that it got."""
    rows: int = 0
    """How many were sent."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of each stage, once all is sent."""

    async def run(self, send: Send[Event]) -> None:
        """Sends the item's events; a failure is one of them."""
        try:
            if isinstance(self.item, TwinlensError):
                raise self.item
            async with self.encoder.ticket(self.item, rows=not self.request.header_only) as ticket:
                await self._deliver(ticket, send)
        except TwinlensError as failure:
            without_traces(failure)  # it may come from a task of ours, whose frames hold the item
            self.failure = failure.reason
            self.meters.failed(failure.reason)
            tracing.failed(failure.reason)
            await send(encoder_pb2.EncodeResponse(error=convert.write_error(self.index, failure)))

    async def _deliver(self, ticket: Ticket, send: Send[Event]) -> None:
        await self._until(self.encoder.resolve(ticket), ticket, send)
        header = await ticket.header()
        await send(self._header(header, ticket))
        stages = ticket.stages
        if not self.request.header_only:
            if header.awaits_kept_rows:
                await self._until(ticket.ready(), ticket, send)
                await send(self._header(ticket.entry.header, ticket))
            await self._send_rows(ticket, header.tokens, send)
            stages = {**ticket.stages, "transfer": self.transfer}
            self.seconds = seconds_of(stages)
            self.meters.served(self.seconds)
        told = {name: stage.since(self.began) for name, stage in stages.items()}
        done = encoder_pb2.EncodeDone(item=self.index, timings=write_stages(told))
        await send(encoder_pb2.EncodeResponse(done=done))

    def _header(self, header: Header, ticket: Ticket) -> encoder_pb2.EncodeResponse:
        layout = self.encoder.layout
        return encoder_pb2.EncodeResponse(header=write_header(self.index, header, layout, cached=ticket.cached))

    async def _send_rows(self, ticket: Ticket, tokens: int, send: Send[Event]) -> None:
        """Every row that the caller wants; the first ones while a worker may still be computing the last."""
        at, end = convert.read_stretch(self.request, self.index, tokens)
        spans: list[tuple[str, float, float]] = []
        while at < end:
            await self._until(ticket.more(at), ticket, send)
            if (allocation := ticket.allocation) is None:  # the rest has failed since
                continue
            run, started = RowRun(self.index, allocation, at, min(end, ticket.landed)), time.perf_counter()
            transport = self.transports.choose(self.request.accepts, self.request.host, run)
            async with aclosing(transport.send(run, self.request.host)) as chunks:
                async for chunk in chunks:
                    if isinstance(chunk, bytes):
                        await send(chunk)
                    else:  # handed-over rows come with a checksum for the message
                        add_checksum(chunk)
                        await send(encoder_pb2.EncodeResponse(rows=chunk))
            spans.append(("transfer", started, time.perf_counter()))
            self.rows += run.end - at
            at = run.end
        await self._until(ticket.ready(), ticket, send)
        for _, started, ended in spans:
            self.transfer = self.transfer.with_more(Stage.between(started, ended))
        computed, seconds = spans[-1][1] if spans else time.perf_counter(), seconds_of(ticket.stages)
        tracing.in_turn(seconds, computed - sum(seconds.values()))
        tracing.record(spans)

    async def _until(self, what: Awaitable[object], ticket: Ticket, send: Send[Event]) -> None:
        """Sends keep-alive events until `what` has completed; raises its error."""
        task = asyncio.ensure_future(what)
        try:
            while not (await asyncio.wait({task}, timeout=PROGRESS_SECONDS))[0]:
                progress = encoder_pb2.EncodeProgress(item=self.index, stage=ticket.stage)
                await send(encoder_pb2.EncodeResponse(progress=progress))
            task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)  # it may be fetching or hashing for a ticket that ends


def ends_item(event: Event) -> bool:
    """Whether this is an item's last message."""
    return not isinstance(event, bytes) and event.WhichOneof("event") in ("done", "error")


def log_deliveries(deliveries: Sequence[Delivery]) -> None:
    """Adds the outcome of its items to a call's log line: a call ends well even if an item fails."""
    seconds = Counter[str]()
    for each in deliveries:
        seconds.update(each.seconds)
    stages = {name: round(value, 4) for name, value in seconds.items()}
    failed = [each.failure for each in deliveries if each.failure]
    log.bind(items=len(deliveries), rows=sum(each.rows for each in deliveries), failed=failed, stages=stages)
