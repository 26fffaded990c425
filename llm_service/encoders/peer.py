"""One encoder as this service sees it: a channel, whether it can be used, and calls under way there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import grpc

from common import log
from common.errors import Cancelled, DataLoss, TwinlensError, Unauthenticated, Unavailable
from common.grpc_calls import from_plain_status
from common.grpc_channel import ChannelSecurity, from_rpc_error, open_channel
from common.wire import RowLayout, crc32c
from llm_service.encoders.convert import media_header, media_message
from llm_service.request import MediaHeader, MediaItem
from twinlens.v1 import encoder_pb2
from twinlens.v1.encoder_pb2_grpc import EncoderServiceStub

_log = log.get("encoders")
_ITEM = "items[0]"
_CHECK_SECONDS = 0.5
_CHECK_TIMEOUT = 2.0


class Peer:
    """An encoder at one address. `watch` keeps `usable` true to life until it is cancelled."""

    def __init__(self, address: str, name: str, security: ChannelSecurity, digest: str) -> None:
        self.address = address
        self.name = name
        self.usable = False
        self.in_flight = 0
        self._digest = digest
        self._foreign = ""
        self._metadata = security.metadata
        self._channel = open_channel(address, security, name=name)
        self._stub = EncoderServiceStub(self._channel)

    async def watch(self, changed: asyncio.Event) -> None:
        """Asks again and again whether the encoder is there and computes what we expect; sets `changed` on news."""
        while True:
            usable = await self._answers()
            if usable != self.usable:
                self.usable = usable
                _log.info("encoder", address=self.address, usable=usable)
                changed.set()
            await asyncio.sleep(_CHECK_SECONDS)

    async def _answers(self) -> bool:
        try:
            info = await self._stub.GetInfo(
                encoder_pb2.EncoderServiceGetInfoRequest(), timeout=_CHECK_TIMEOUT, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            _log.debug("encoder does not answer", address=self.address, code=error.code().name)
            return False
        if info.digest not in (self._digest, self._foreign):
            self._foreign = info.digest
            _log.warning("encoder serves another model", address=self.address, digest=info.digest)
        return bool(info.digest == self._digest)

    def suspect(self) -> None:
        """Takes the encoder out of use until it has answered again."""
        self.usable = False

    @asynccontextmanager
    async def encode(
        self, item: MediaItem, *, request_id: str, salt: str, priority: int, timeout: float, layout: RowLayout
    ) -> AsyncIterator[EncodeCall]:
        """Opens an Encode stream for one item; it is cancelled when the block is left early. `timeout` in seconds."""
        request = encoder_pb2.EncodeRequest(
            request_id=request_id,
            items=[media_message(item)],
            cache_salt=salt,
            priority=priority,
            accepts=[encoder_pb2.TRANSPORT_INLINE],
        )
        call = self._stub.Encode(request, timeout=timeout, metadata=self._metadata)
        self.in_flight += 1
        try:
            yield EncodeCall(call, layout, item.field)
        finally:
            self.in_flight -= 1
            call.cancel()

    async def close(self, grace: float | None = None) -> None:
        """Closes the channel; calls under way have `grace` seconds to end."""
        await self._channel.close(grace)


class EncodeCall:
    """An open Encode stream of one item: `header` first, then `rows`; after the last row, `timings` holds the
    encoder's own seconds by stage."""

    def __init__(
        self,
        call: grpc.aio.UnaryStreamCall[encoder_pb2.EncodeRequest, encoder_pb2.EncodeResponse],
        layout: RowLayout,
        field: str,
    ) -> None:
        self._call = call
        self._layout = layout
        self._field = field
        self.timings: dict[str, float] = {}

    async def header(self) -> MediaHeader:
        """Waits for the header; raises the encoder's error, Unavailable, or DataLoss where it fits no row of ours."""
        async with aclosing(self._events()) as events:
            async for event in events:
                if event.WhichOneof("event") == "header":
                    header = media_header(event.header)
                    self._check(header)
                    return header
        raise Unavailable("the encoder ended the stream before the header")

    def _check(self, header: MediaHeader) -> None:
        layout = self._layout
        if (header.levels, header.width, header.dtype) != (layout.levels, layout.width, layout.dtype.value):
            raise DataLoss("the encoder's rows do not fit this model")

    async def rows(self, skip: int, total: int) -> AsyncGenerator[bytes, None]:
        """Yields runs of whole rows in order, from row `skip` on, until `total` have come; each is checked first."""
        expected = 0
        async with aclosing(self._events()) as events:
            async for event in events:
                if event.WhichOneof("event") != "rows":
                    continue
                rows = event.rows
                if rows.first_row != expected or len(rows.data) != rows.count * self._layout.row_bytes:
                    raise DataLoss("rows came out of order or in a wrong size")
                if crc32c(rows.data) != rows.crc32c:
                    raise DataLoss("rows were damaged on the way")
                expected += rows.count
                if expected > total:
                    raise DataLoss("more rows came than the header said")
                if expected > skip:
                    fresh = min(rows.count, expected - skip)
                    yield rows.data[len(rows.data) - fresh * self._layout.row_bytes :]
        if expected != total:
            raise Unavailable("the encoder ended the stream before the last row")

    async def _events(self) -> AsyncGenerator[encoder_pb2.EncodeResponse, None]:
        """The stream's events up to `done`; an item's error, or the call's, is raised as ours."""
        while True:
            try:
                event = await self._call.read()
            except grpc.aio.AioRpcError as error:
                raise _ours(from_rpc_error(error)) from error
            if not isinstance(event, encoder_pb2.EncodeResponse):
                return
            if event.WhichOneof("event") == "done":
                self.timings = {timing.stage: timing.seconds for timing in event.done.timings}
                return
            if event.WhichOneof("event") == "error":
                raise self._own(from_plain_status(event.error.status))
            yield event

    def _own(self, error: TwinlensError) -> TwinlensError:
        """An item's error with the field that our caller knows: the encoder was sent this one item."""
        if error.field.startswith(_ITEM):
            error.field = self._field + error.field.removeprefix(_ITEM)
        return error


def _ours(error: TwinlensError) -> TwinlensError:
    """What a caller is told of a call to an encoder that broke."""
    if isinstance(error, Unavailable | Cancelled | Unauthenticated):  # of the link, not of the caller's doing
        return Unavailable("the encoder could not be reached", reason="ENCODER_UNAVAILABLE")
    return error
