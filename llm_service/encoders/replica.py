"""One encoder as seen by this service: its channels, whether it can be used, and its shared memory on the same host."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from common.aio import tasks
from common.media.convert import write_media
from common.rpc.channel import from_rpc_error, is_stream_reset
from common.telemetry import log
from llm_service.encoders.breaker import Breaker, Quarantine
from llm_service.encoders.connections import Connections
from llm_service.encoders.health import EncoderHealth, Verdict
from llm_service.encoders.obstacle_hints import hint
from llm_service.encoders.pace import Pace
from llm_service.encoders.settings import EncodeParams, EncoderSettings
from llm_service.encoders.stream import EncodeStream
from llm_service.encoders.transports.base import Transport
from llm_service.encoders.transports.transports import transports_from
from llm_service.request import MediaItem
from twinlens.v1 import encoder_pb2

_log = log.get("encoders")
_CHECK_TIMEOUT = 2.0
_LARGE = 256 << 10
"""Bytes of content whose copy is made in a thread, since it would block the event loop for longer than that costs."""
_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """An EncodeRequest as sent, and what its stream must know: the transports by which rows may come, and the item's
    field in its request."""

    body: bytes
    transports: list[Transport]
    field: str
    params: EncodeParams


class Replica:
    """An encoder at one address. `watch` keeps `health` up to date until it is cancelled. `on_room` is called when
    there may be room for one more item. `trouble` is why it could not be used last, and `starting` that it said so;
    `last_load` is its last load."""

    def __init__(
        self,
        address: str,
        name: str,
        settings: EncoderSettings,
        quarantine: Quarantine,
        on_room: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address
        self.name = name
        self.health = EncoderHealth(address, quarantine, settings.check_seconds)
        self.breaker = Breaker()
        self.pace = Pace(settings.hedge or settings.timeout)
        self.trouble = ""
        self.starting = False
        self._settings = settings
        self._streams: set[EncodeStream] = set()
        self._releases: set[asyncio.Task[bool | None]] = set()
        self.last_load = encoder_pb2.EncoderServiceGetLoadResponse()
        self._foreign = ""
        self.full_until = 0.0
        self._openings = 0
        self._on_room = on_room
        self._transports = transports_from(
            address,
            settings.layout.dtype,
            shared_memory=settings.shared_memory,
            folder=settings.local_dir,
            mirrors=settings.mirrors,
            nixl=settings.nixl,
            on_lost=self._lost,
            release=self._release,
        )
        self._connections = self._connect()

    def _connect(self) -> Connections:
        return Connections(self.address, self.name, self._settings.security, self._settings.connections)

    def reconnect(self) -> Connections:
        """Has further calls use new connections, with the current files. Returns the old ones, where calls may be in
        progress. Raises OSError if the files cannot be read now, without any change."""
        before, self._connections = self._connections, self._connect()
        return before

    @property
    def usable(self) -> bool:
        """Whether it answers, has our digest, and its streams hold."""
        return self.health.answers and self.breaker.closed

    @property
    def unsure(self) -> bool:
        """Whether it may still be up: `EncoderHealth.unsure`. For use if there is no other."""
        return self.health.unsure and self.breaker.closed

    @property
    def full(self) -> bool:
        """It said lately that it has as much as it can hold, and as many streams as have ended since were opened."""
        return time.monotonic() < self.full_until and self._openings <= 0

    @property
    def passed_over(self) -> bool:
        """Whether items have waited far too long there, and it is not to be tried again yet."""
        return self.pace.slow and not (self.pace.may_be_tried and not self._streams)

    def expected(self, patches: int) -> float:
        """Seconds that an item of so many patches, sent now, would wait for a row: as recent items did, or as long as
        one waits already, or by the encoder's own estimate."""
        waiting = max((stream.waited() for stream in self._streams), default=0.0)
        return max(self.pace.expected(patches), waiting, self.last_load.estimated_milliseconds / 1000)

    @property
    def in_flight(self) -> int:
        """Streams of ours that are open."""
        return len(self._streams)

    @property
    def load(self) -> int:
        """Patches that wait or are computed there, for anyone: its last report or, if that is more, what it has
        announced on our streams since."""
        ours = {each.announced.key: each.announced.grid.patches for each in self._streams if each.announced}
        return max(self.last_load.queued_patches + self.last_load.running_patches, sum(ours.values()))

    async def watch(self, changed: asyncio.Event) -> None:
        """Checks regularly whether the encoder is up and has our digest; sets `changed` on news."""
        await self.health.watch(self._check, changed)

    async def _check(self) -> Verdict:
        began, metadata = time.monotonic(), self._settings.security.metadata
        self._connections.connect()
        try:
            info: Any = await self._connections.stub.GetInfo(
                encoder_pb2.EncoderServiceGetInfoRequest(),
                timeout=_CHECK_TIMEOUT,
                metadata=metadata,
            )
            load: Any = await self._connections.stub.GetLoad(
                encoder_pb2.EncoderServiceGetLoadRequest(),
                timeout=_CHECK_TIMEOUT,
                metadata=metadata,
            )
        except grpc.aio.AioRpcError as error:
            self.trouble = hint(error.code(), error.details() or "", self._settings.security)
            self.starting = from_rpc_error(error).reason == "STARTING"
            _log.debug("encoder does not answer", address=self.address, code=error.code().name)
            return self._failed(_EXHAUSTED if is_stream_reset(error) else error.code(), began)
        self.starting = False
        return await self._judge(info, load)

    async def _judge(self, info: Any, load: Any) -> Verdict:
        """The verdict on what an encoder says of itself: whether it serves our model, and can be reached for items."""
        if info is None or load is None:  # gRPC turns invalid bytes into None
            self.trouble = "its answer is not one of our messages"
            return Verdict.GONE
        self.last_load = load
        self.health.hear()
        if info.digest not in (self._settings.digest, self._foreign):
            self._foreign = info.digest
            _log.warning(
                "encoder serves another model",
                address=self.address,
                model=info.model,
                digest=info.digest,
                wanted=self._settings.digest,
                hint="the same checkpoint, processor settings and --dtype give the same digest",
            )
        if info.digest != self._settings.digest:
            self.trouble = "it serves another model, or with other settings or another --dtype"
            return Verdict.GONE
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT):
                await self._connections.connected()  # it may be back, and a connection still wait to be tried again
        except (TimeoutError, grpc.aio.UsageError):
            self.trouble = "it answers, but not every connection to it can be made"
            return Verdict.LATE
        if not self.health.fits:
            self.breaker.succeeded()  # streams of its earlier life say nothing about this one
        self.trouble = "it answers, but its streams break"  # the only remaining obstacle of one that answers
        for transport in self._transports:
            await transport.on_info(info)
        return Verdict.ANSWERS

    def _failed(self, code: grpc.StatusCode, began: float) -> Verdict:
        """The verdict when a check, begun at `began`, failed: an encoder that is busy, but active on streams, is not
        gone."""
        if code is _EXHAUSTED and self.health.fits:
            self.refused(self._settings.check_seconds)
            return Verdict.ANSWERS
        if code is not grpc.StatusCode.DEADLINE_EXCEEDED:
            return Verdict.GONE
        return Verdict.ANSWERS if self.health.answers and self.health.last_heard > began else Verdict.LATE

    def _lost(self) -> None:
        """The encoder's process has ended."""
        self._close_transports()
        self.health.suspect()

    def _release(self, lease: str) -> asyncio.Task[bool | None]:
        """Releases a lease in the background; if that fails, it expires."""
        task = asyncio.create_task(self._give_back(lease), name="give back a lease")
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)
        return task

    async def _give_back(self, lease: str) -> bool | None:
        """Returns whether the lease was still valid; None if the encoder does not say."""
        call: Any = self._connections.stub.Release
        try:
            answer: encoder_pb2.ReleaseResponse | None = await call(
                encoder_pb2.ReleaseRequest(leases=[lease]),
                timeout=_CHECK_TIMEOUT,
                metadata=self._settings.security.metadata,
            )
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
            _log.debug("a lease is not given back", address=self.address, cause=type(error).__name__)
            return None
        return None if answer is None else answer.released > 0

    def _close_transports(self) -> None:
        for transport in self._transports:
            transport.close()

    def refused(self, seconds: float) -> None:
        """It is full, and says when to ask again."""
        self.full_until = time.monotonic() + seconds
        self._openings = 0

    @property
    def transports(self) -> list[encoder_pb2.Transport]:
        """The numbers of the transports by which rows may come now."""
        return [each.number for each in self._transports if each.usable]

    def ways(self, params: EncodeParams) -> list[Transport]:
        """The transports by which rows may come now, the shortest first."""
        return [each for each in self._transports if each.usable and _may_bring(each, params)]

    def parts(self, size: int) -> int:
        """The best number of concurrent streams for so many bytes of an item's rows; one if memory is shared."""
        shortest = next(each for each in self._transports if each.usable)
        return max(1, min(size // self._settings.part_bytes, len(self._connections))) if shortest.splits else 1

    async def prepare(self, item: MediaItem, params: EncodeParams) -> PreparedRequest:
        """The request for one item; large content is copied in a thread."""
        settings = self._settings
        transports = self.ways(params)
        request = encoder_pb2.EncodeRequest(
            request_id=params.request_id,
            cache_salt=params.salt,
            priority=params.priority,
            accepts=[transport.number for transport in transports],
            first_rows=[params.first] if params.first else [],
            end_rows=[params.end] if params.end else [],
            attempt=params.attempt,
            digest=settings.digest,
        )
        for transport in transports:
            transport.prove(request.host)
        pieces = [request.SerializeToString(), *write_media(item)]
        body = await tasks.to_thread(b"".join, pieces) if item.size > _LARGE else b"".join(pieces)
        return PreparedRequest(body, transports, item.field, params)

    @contextmanager
    def encode(self, prepared: PreparedRequest) -> Iterator[EncodeStream]:
        """Opens an Encode stream for one item; it is cancelled when the block is left early."""
        settings = self._settings
        with self._connections.encode(prepared.body, settings.timeout) as call:
            stream = EncodeStream(
                call,
                prepared.transports,
                settings,
                prepared.params,
                prepared.field,
                on_event=self.health.hear,
                heard_at=lambda: self.health.last_heard,
            )
            del prepared  # its item may be large, and the stream long
            self._streams.add(stream)
            self._openings -= 1
            try:
                yield stream
            finally:
                self._streams.discard(stream)
                self._openings += 1
                self._on_room()

    async def close(self, grace: float | None = None) -> None:
        """Closes the connections; calls under way have `grace` seconds to end."""
        try:
            await self._connections.close(grace)
        finally:
            self._close_transports()


def _may_bring(transport: Transport, params: EncodeParams) -> bool:
    """Whether an item's rows may come in this way, after what became of its streams before."""
    return (transport.after_break or not params.broke) and not (transport.leased and params.late)
