"""One encoder as this service sees it: a channel, whether it can be used, its memory where the host is shared."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from common import log
from common.grpc_channel import ChannelSecurity, from_rpc_error
from common.media.convert import write_media
from common.wire import RowLayout
from llm_service.encoders.absence import trouble
from llm_service.encoders.breaker import Breaker, Quarantine
from llm_service.encoders.connections import Connections
from llm_service.encoders.health import CHECK_SECONDS, Health, Verdict
from llm_service.encoders.stream import EncodeStream
from llm_service.encoders.transports.base import Transport
from llm_service.encoders.transports.cuda_ipc import CudaIpc
from llm_service.encoders.transports.inline import Inline
from llm_service.encoders.transports.shared_memory import Region
from llm_service.engine.mirrors import Mirrors
from llm_service.request import MediaItem
from twinlens.v1 import encoder_pb2

_log = log.get("encoders")
_CHECK_TIMEOUT = 2.0
_MAP_AGAIN_SECONDS = 30.0
"""From one try to share an encoder's memory to the next: on another host it cannot work, and where descriptors or
threads were short for a moment, on either side, it does later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """How this service deals with encoders.

    `digest` is what theirs must be, `merge` the patches on a side of one row; `timeout` bounds a stream and `silence`
    the time between its events, in seconds; `connections` is how many there are to each; `local_dir` is the folder of
    local sockets that are files. `mirrors` are those that ranks keep of the row arena.

    The rest are no options. Addresses are looked up every `resolve_seconds`, and an encoder is asked every
    `check_seconds` whether it lives; where none can be used, an item waits `pick_seconds` for one. A part of an item's
    rows has at least `part_bytes`: below it, opening one more stream takes longer than it can save.
    """

    digest: str
    layout: RowLayout
    merge: int
    security: ChannelSecurity = field(default_factory=ChannelSecurity)
    timeout: float = 120.0
    silence: float = 2.5
    connections: int = 1
    shared_memory: bool = True
    local_dir: str = ""
    mirrors: Mirrors | None = None
    resolve_seconds: float = 2.0
    check_seconds: float = CHECK_SECONDS
    pick_seconds: float = 0.8
    part_bytes: int = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """What is told to an encoder with an item: whose it is, from which row on it is wanted and before which one to stop
    (0: none), and how often before. After a stream of the item `broke`, not every way is tried."""

    request_id: str
    salt: str
    priority: int
    first: int = 0
    end: int = 0
    attempt: int = 0
    broke: bool = False


class Peer:
    """An encoder at one address. `watch` keeps `health` true to life until it is cancelled. `on_room` is called when
    there may be room for one more item. `trouble` is why it could not be used last, and `starting` that it said so."""

    def __init__(
        self,
        address: str,
        name: str,
        settings: LinkSettings,
        quarantine: Quarantine,
        on_room: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address
        self.name = name
        self.health = Health(address, quarantine, settings.check_seconds)
        self.breaker = Breaker()
        self.trouble = ""
        self.starting = False
        self.region: Region | None = None
        self.device: CudaIpc | None = None
        self._settings = settings
        self._streams: set[EncodeStream] = set()
        self._told_load = 0
        self._foreign = ""
        self._no_region: bytes = b""
        self._map_again = 0.0
        self.full_until = 0.0
        self._openings = 0
        self._on_room = on_room
        self._inline = Inline(settings.layout.dtype)
        self._metadata = settings.security.metadata
        self._connections = Connections(address, name, settings.security, settings.connections)

    @property
    def usable(self) -> bool:
        """It answers, computes what we expect, and its streams hold."""
        return self.health.answers and self.breaker.closed

    @property
    def unsure(self) -> bool:
        """It may answer as before: `Health.unsure`. For those who have nobody else to ask."""
        return self.health.unsure and self.breaker.closed

    @property
    def full(self) -> bool:
        """It said lately that it has as much as it can hold, and as many streams as have ended since were opened."""
        return time.monotonic() < self.full_until and self._openings <= 0

    @property
    def in_flight(self) -> int:
        """Streams of ours that are open."""
        return len(self._streams)

    @property
    def load(self) -> int:
        """Patches that wait or are computed there, for anyone: what it said last or, where that is more, what it has
        announced on streams of ours, which may be news to it since."""
        ours = {each.announced.key: each.announced.grid.patches for each in self._streams if each.announced}
        return max(self._told_load, sum(ours.values()))

    async def watch(self, changed: asyncio.Event) -> None:
        """Asks again and again whether the encoder is there and computes what we expect; sets `changed` on news."""
        await self.health.watch(self._check, changed)

    async def _check(self) -> Verdict:
        began = time.monotonic()
        try:
            info: Any = await self._connections.stub.GetInfo(
                encoder_pb2.EncoderServiceGetInfoRequest(), timeout=_CHECK_TIMEOUT, metadata=self._metadata
            )
            load: Any = await self._connections.stub.GetLoad(
                encoder_pb2.EncoderServiceGetLoadRequest(), timeout=_CHECK_TIMEOUT, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            self.trouble = trouble(error.code(), error.details() or "", self._settings.security)
            self.starting = from_rpc_error(error).reason == "STARTING"
            _log.debug("encoder does not answer", address=self.address, code=error.code().name)
            return self._failed(error.code(), began)
        self.starting = False
        if info is None or load is None:  # what gRPC makes of bytes that are no message
            self.trouble = "what it answers is no message of ours"
            return Verdict.GONE
        self._told_load = load.queued_patches + load.running_patches
        if info.digest not in (self._settings.digest, self._foreign):
            self._foreign = info.digest
            _log.warning("encoder serves another model", address=self.address, digest=info.digest)
        if info.digest != self._settings.digest:
            self.trouble = "it serves another model, or with other settings or another --dtype"
            return Verdict.GONE
        if not self.health.fits:
            self.breaker.succeeded()  # what its streams did in another life says nothing of this one
        await self._map(info.local_socket)
        if self.device is not None:
            self.device.listed(info.device_pools)
        return Verdict.ANSWERS

    def _failed(self, code: grpc.StatusCode, began: float) -> Verdict:
        """What it means that a question, asked at `began`, failed: who is busy, and speaks on streams, is not gone."""
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and self.health.fits:
            self.refused(self._settings.check_seconds)
            return Verdict.ANSWERS
        if code is not grpc.StatusCode.DEADLINE_EXCEEDED:
            return Verdict.GONE
        return Verdict.ANSWERS if self.health.answers and self.health.heard > began else Verdict.LATE

    async def _map(self, socket: encoder_pb2.LocalSocket) -> None:
        """Tries to share memory with an encoder: at once in each of its lives, and now and then where it fails."""
        settings, now = self._settings, time.monotonic()
        wanted = settings.shared_memory and bool(socket.name)
        if not wanted or self.region is not None or (socket.secret == self._no_region and now < self._map_again):
            return
        try:
            region = await asyncio.to_thread(
                Region.open, socket.name, settings.local_dir, socket.secret, settings.layout.dtype
            )
        except TimeoutError:
            return  # it has too much to do to greet anyone: the next check tries again
        except (OSError, ValueError, RuntimeError) as error:  # the last where there is no thread to be had
            if socket.secret != self._no_region:
                _log.info("no memory is shared with this encoder", address=self.address, cause=str(error))
            self._no_region, self._map_again = socket.secret, now + _MAP_AGAIN_SECONDS
            return
        self.region = region
        if settings.mirrors is not None:
            self.device = CudaIpc(region, settings.mirrors)
        region.watch(self._lost)
        _log.info("memory is shared with this encoder", address=self.address)

    def _lost(self) -> None:
        """The encoder's process has ended."""
        self._unmap()
        self.health.suspect()

    def _unmap(self) -> None:
        if self.device is not None:
            self.device.close()
            self.device = None
        if self.region is not None:
            self.region.close()
            self.region = None

    def refused(self, seconds: float) -> None:
        """It is full, and says when to ask again."""
        self.full_until = time.monotonic() + seconds
        self._openings = 0

    def _transports(self, asking: Asking) -> list[Transport]:
        """The ways in which rows may come, the shortest first. What broke once comes by way of the host's memory: if a
        device is what is wrong, that is the end of it."""
        if self.region is None:
            return [self._inline]
        if self.device is None or not self.device.devices or asking.broke:
            return [self.region, self._inline]
        return [self.device, self.region, self._inline]

    def parts(self, size: int) -> int:
        """By how many streams at a time so many bytes of an item's rows come best; where memory is shared, by one."""
        return max(1, min(size // self._settings.part_bytes, len(self._connections))) if self.region is None else 1

    @contextmanager
    def encode(self, item: MediaItem, asking: Asking) -> Iterator[EncodeStream]:
        """Opens an Encode stream for one item; it is cancelled when the block is left early."""
        settings = self._settings
        transports = self._transports(asking)
        request = encoder_pb2.EncodeRequest(
            request_id=asking.request_id,
            items=[write_media(item)],
            cache_salt=asking.salt,
            priority=asking.priority,
            accepts=[transport.number for transport in transports],
            first_rows=[asking.first] if asking.first else [],
            end_rows=[asking.end] if asking.end else [],
            attempt=asking.attempt,
            digest=settings.digest,
        )
        for transport in transports:
            transport.prove(request.host)
        body = request.SerializeToString()
        del request  # its item may be large, and the stream long
        with self._connections.encode(body, settings.timeout) as call:
            del body
            stream = EncodeStream(
                call,
                transports,
                settings.layout,
                settings.merge,
                field=item.field,
                first=asking.first,
                end=asking.end,
                silence=settings.silence,
                on_event=self.health.hear,
            )
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
            self._unmap()
