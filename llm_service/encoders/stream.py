"""One open Encode stream of one item: its header, then its rows, each checked before it counts."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import grpc

from common.aio import tasks
from common.errors import (
    CALLER_STALLED,
    ENCODER_SLOW,
    Cancelled,
    DataLoss,
    Exhausted,
    InvalidInput,
    TwinlensError,
    Unauthenticated,
    Unavailable,
)
from common.media.convert import read_header, read_stages, verify_checksum
from common.media.item import HEADER_SHAPES, Header
from common.rows.frames import RowsFrame, unpack
from common.rows.wire import RowLayout
from common.rpc.channel import from_rpc_error, is_stream_refused, is_too_large, is_transport_error
from common.rpc.status import from_plain_status
from common.telemetry.stages import Stage
from llm_service.encoders.row_wait import RowWait
from llm_service.encoders.settings import EncodeParams, EncoderSettings
from llm_service.encoders.transports.base import ArrivedRows, MirrorPlace, Transport
from twinlens.v1 import encoder_pb2

Event = encoder_pb2.EncodeResponse | RowsFrame
Call = grpc.aio.UnaryStreamCall[Any, Event]

UNREACHABLE = "ENCODER_UNAVAILABLE"
"""The reason of an error that is the link's: the encoder may have died."""

_ITEM = "items[0]"
_ON_THE_WAY = 4
"""How many times as long as a silent encoder an event is awaited while the encoder is heard elsewhere."""


def read_event(message: bytes) -> Event:
    """An event of the stream; runs of rows are parsed without protobuf, which would copy them twice more."""
    return unpack(message) or encoder_pb2.EncodeResponse.FromString(message)


class EncodeStream:
    """An item's stream, as `params` asked for it; `field` is the item's in its request. Its opener closes it.

    It ends after `settings.silence` seconds without an event: a busy encoder sends one every second. `on_event` is
    called for each event. If the encoder's other messages come, the last at `heard_at` (monotonic seconds), an event
    may be on its way over a slow network for four times as long, and the request for any time.

    `begun` says whether the encoder has begun the item, `announced` what it has announced to compute, `wait` how long
    the next row is awaited. After the last row, `stages` has the encoder's, on our clock.
    """

    def __init__(
        self,
        call: Call,
        transports: Sequence[Transport],
        settings: EncoderSettings,
        params: EncodeParams,
        field: str,
        *,
        on_event: Callable[[], None] = lambda: None,
        heard_at: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._call = call
        self._transports = transports
        self._settings = settings
        self._params = params
        self._field = field
        self._on_event = on_event
        self._heard_at = heard_at
        self.begun = False
        self.announced: Header | None = None
        self.wait = RowWait()
        self._next: ArrivedRows | None = None
        self.stages: dict[str, Stage] = {}
        self._called = time.perf_counter()

    async def header(self) -> Header:
        """Waits for the header, of a pruned video for the one that says which rows are kept. Raises the encoder's
        error, Unavailable, or DataLoss if it does not fit our rows."""
        told: Header | None = None
        async with aclosing(self._events()) as events:
            async for event in events:
                if isinstance(event, encoder_pb2.EncodeResponse) and event.WhichOneof("event") == "header":
                    header, layout = read_header(event.header)
                    self._check(header, layout)
                    if told is not None and not told.agrees(header):
                        raise DataLoss("the encoder's second header contradicts the first")
                    self.announced = None if header.cached else header
                    if not header.awaits_kept_rows:
                        return header
                    told = header
        raise Unavailable("the encoder ended the stream before the header")

    def waited(self, *, with_room: bool = False) -> float:
        """Seconds for which the encoder has worked on the item without a row; see `RowWait`."""
        return self.wait.with_room if with_room else self.wait.seconds

    @property
    def longest_wait(self) -> float:
        """The longest of these times before a row."""
        return self.wait.longest

    async def arrived(self) -> None:
        """Waits for the next rows, with which `rows` then begins, or until there are none. Raises as `rows`. If
        cancelled, it ends the stream."""
        async with aclosing(self._runs()) as runs:
            async for run in runs:
                if run is not None:
                    self._next = run
                    return

    async def _runs(self) -> AsyncGenerator[ArrivedRows | None, None]:
        """The runs of rows, and None whenever the encoder says that it has none at the moment."""
        if self._next is not None:
            run, self._next = self._next, None
            yield run
        async with aclosing(self._events()) as events:
            async for event in events:
                yield _run(event)

    def _check(self, header: Header, layout: RowLayout) -> None:
        if layout != self._settings.layout:
            raise DataLoss("the encoder's rows do not fit this model")
        if not is_consistent(header, self._settings.merge):
            raise DataLoss("the encoder's header contradicts itself")
        places = [part.rows for part in header.replacement]
        rows = sum(places) if self._settings.layout_from_encoder else header.tokens
        if rows != header.tokens or min(places, default=0) < 0:
            raise DataLoss("the encoder's header has different numbers of places and rows")
        if not all(map(math.isfinite, (*header.timestamps, header.seconds_per_grid))):
            raise DataLoss("the encoder's header has times that are not numbers")

    async def rows(
        self, target: memoryview, mirror: MirrorPlace | None = None
    ) -> AsyncGenerator[tuple[int, int], None]:
        """Copies the stream's rows to their place in `target`, which has room for all of the item's, or into the ranks'
        mirrors; yields how many more have arrived, and the number of their transport. Yields 0 rows for each message in
        which the encoder says that it is at work.

        Runs must come in order and without gaps. Raises DataLoss for any that is not as announced.
        """
        size = self._settings.layout.row_bytes
        expected, end = self._params.first, self._params.end or len(target) // size
        async with aclosing(self._runs()) as runs:
            async for run in runs:
                if run is None:
                    yield 0, encoder_pb2.TRANSPORT_UNSPECIFIED
                    continue
                if run.first != expected or run.count < 1 or run.first + run.count > end:
                    raise DataLoss("rows came out of order, or more than the header announced")
                place = target[run.first * size : (run.first + run.count) * size]
                if mirror is not None:
                    run = replace(run, mirror=MirrorPlace(mirror.offset + run.first * size, mirror.mirrored))
                landed, transport = 0, self._transport(run)
                async with aclosing(transport.receive(run, place)) as pieces:
                    async for piece in pieces:
                        whole = (landed + piece) // size - landed // size
                        landed += piece
                        yield whole, transport.number
                expected += run.count
        if expected != end:
            raise Unavailable("the encoder ended the stream before the last row")

    def _transport(self, run: ArrivedRows) -> Transport:
        for transport in self._transports:
            if transport.takes(run):
                return transport
        raise DataLoss("rows came in a way that was not negotiated")

    async def _events(self) -> AsyncGenerator[Event, None]:
        """The stream's events up to `done`; an item's error, or the call's, is raised as ours."""
        if not self.begun:
            await self._request_there()
        while True:
            began = time.monotonic()
            try:
                async with tasks.StallTolerantTimeout(self._settings.silence, self._patience()):
                    event = await self._call.read()
                self._on_event()
            except grpc.aio.AioRpcError as error:
                raise _ours(error, self._field) from error
            except TimeoutError:
                raise _silent() from None
            seconds = time.monotonic() - began
            if isinstance(event, RowsFrame):
                self.wait.on_rows(seconds)
                yield event
                continue
            if not isinstance(event, encoder_pb2.EncodeResponse):
                return
            self.begun = True
            if event.WhichOneof("event") == "rows":
                self.wait.on_rows(seconds)
            else:
                self.wait.on_message(seconds, event.progress.stage)
            if event.WhichOneof("event") == "done":
                self.stages = read_stages(event.done.timings, self._called)
                return
            if event.WhichOneof("event") == "error":
                # The encoder was sent this one item, under a name that our caller does not know.
                raise from_plain_status(event.error.status).at(self._field, instead_of=_ITEM)
            yield event

    def _patience(self) -> Callable[[], float]:
        """Tells, whenever the next event has not come by then, how many seconds more it may take."""
        loop = asyncio.get_running_loop()
        last = loop.time() + _ON_THE_WAY * self._settings.silence
        return lambda: min(self._heard_at() + self._settings.silence, last) - loop.time()

    async def _request_there(self) -> None:
        """Waits until the encoder has the whole request, or the call has ended. A request may be large, or queue within
        gRPC because the peer accepts no more streams on a connection: an encoder that has not been asked yet is not
        silent."""
        opened = time.monotonic()
        while (left := max(opened, self._heard_at()) + self._settings.silence - time.monotonic()) > 0:
            with suppress(TimeoutError):
                async with tasks.StallTolerantTimeout(left):
                    await self._call.initial_metadata()
                    return
        raise _silent()


def is_consistent(header: Header, merge: int) -> bool:
    """Whether grid, rows and times go together. Of a clip, how many rows its grid has is its family's business."""
    grid, shape = header.grid, HEADER_SHAPES[header.modality]
    if not shape.has_plane:
        return (grid.t, grid.h) == (1, 1) and header.tokens <= grid.w and not (header.timestamps or header.grid_rows)
    # Headers with a replacement have no times of their own.
    timed = shape.has_times and not header.replacement
    groups = len(header.timestamps) + (not timed)
    if grid.h % merge or grid.w % merge or groups != grid.t:
        return False
    return header.all_rows * merge**2 == grid.patches


def _run(event: Event) -> ArrivedRows | None:
    if isinstance(event, RowsFrame):
        return ArrivedRows(event.first, event.count, event)
    if event.WhichOneof("event") != "rows":
        return None
    rows = event.rows
    if rows.WhichOneof("payload") == "handle":
        verify_checksum(rows)  # a damaged handle may point at the rows of another item
        return ArrivedRows(rows.first_row, rows.count, rows.handle)
    frame = RowsFrame(rows.item, rows.first_row, rows.count, rows.data, rows.crc32c)
    return ArrivedRows(frame.first, frame.count, frame)


def _silent() -> Unavailable:
    return Unavailable("the encoder is silent", reason="ENCODER_SILENT")


def _ours(error: grpc.aio.AioRpcError, field: str) -> TwinlensError:
    """The caller's error for a failed call to an encoder. Failures reported by gRPC, not the encoder, belong to the
    link, unless they concern the message's size; so do the encoder's complaints about this service: requests are not at
    fault there."""
    if is_too_large(error):
        return InvalidInput("the item is larger than the encoder accepts", reason="MEDIA_TOO_LARGE", field=field)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:  # that of the stream; no caller's deadline goes to encoders
        return Unavailable("an encoder took too long to encode an item", reason=ENCODER_SLOW, field=field)
    if is_stream_refused(error):  # one stream has ended here, but not there yet, and the next is one too many
        why = "an encoder has too many streams from this service"
        return Exhausted(why, reason="TOO_MANY_CALLS", field=field, retry_after=0.1)
    stated = from_rpc_error(error)
    if stated.reason == CALLER_STALLED:  # it waited for us
        return stated
    if is_transport_error(error) or isinstance(stated, Unavailable | Cancelled | Unauthenticated):
        return Unavailable("the encoder could not be reached", reason=UNREACHABLE)
    return stated
