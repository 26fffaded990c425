"""Rows read directly from an encoder's memory, which this process has mapped; see `common.shm.local_link`."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from common.aio import tasks
from common.errors import LEASE_EXPIRED, DataLoss, Unavailable
from common.rows.wire import DType
from common.shm import local_link
from common.shm.arena import ReaderView
from common.shm.lease_board import BoardReader
from common.shm.local_link import RELEASE
from common.telemetry import log
from llm_service.encoders.transports.base import ArrivedRows
from llm_service.encoders.transports.copier import Copier
from twinlens.v1 import encoder_pb2

_log = log.get("encoders")
_MAP_AGAIN_SECONDS = 30.0
"""Seconds between attempts to share an encoder's memory: on another host it cannot work, and if descriptors or threads
were short on either side, it may work later."""


class SharedMemory:
    """The memory of one encoder, `region` while it is mapped. Mapping is tried at once in each of the encoder's lives,
    and now and then after failures. `on_lost` is called when the encoder's process has ended."""

    number: encoder_pb2.Transport = encoder_pb2.TRANSPORT_SHARED_MEMORY
    splits = False
    after_break = True
    leased = True

    def __init__(self, address: str, folder: str, dtype: DType, on_lost: Callable[[], None]) -> None:
        self.region: Region | None = None
        self._address = address
        self._folder = folder
        self._dtype = dtype
        self._on_lost = on_lost
        self._refused = b""
        self._again = 0.0

    @property
    def usable(self) -> bool:
        """It is mapped."""
        return self.region is not None

    async def on_info(self, info: encoder_pb2.EncoderServiceGetInfoResponse) -> None:
        """Tries to map it."""
        name, secret, now = info.local_socket.name, info.local_socket.secret, time.monotonic()
        if not name or self.region is not None or (secret == self._refused and now < self._again):
            return
        try:
            region = await tasks.to_thread(Region.open, name, self._folder, secret, self._dtype)
        except TimeoutError:
            return  # it has too much to do to greet anyone: the next check tries again
        except (OSError, ValueError, RuntimeError) as error:  # the last if no thread can be started
            if secret != self._refused:
                _log.info("no memory is shared with this encoder", address=self._address, cause=str(error))
            self._refused, self._again = secret, now + _MAP_AGAIN_SECONDS
            return
        self.region = region
        region.watch(self._on_lost)
        _log.info("memory is shared with this encoder", address=self._address)

    def close(self) -> None:
        """Unmaps the memory."""
        region, self.region = self.region, None
        if region is not None:
            region.close()

    def prove(self, host: encoder_pb2.HostProof) -> None:
        """States the grant that came over the local socket."""
        if self.region is not None:
            self.region.prove(host)

    def takes(self, run: ArrivedRows) -> bool:
        """The run lies in this memory."""
        return self.region is not None and self.region.takes(run)

    def receive(self, run: ArrivedRows, target: memoryview) -> AsyncGenerator[int, None]:
        """Copies in parts, and releases the lease at the end in any case."""
        assert self.region is not None
        return self.region.receive(run, target)


class Region:
    """One encoder's arena and lease board, mapped for reading, and the connection that they came over."""

    def __init__(self, link: socket.socket, shared: local_link.SharedArena, name: str, dtype: DType) -> None:
        self._link = link
        self._name = name
        self._grant = shared.grant
        self._closed = False
        try:
            self._arena = ReaderView(shared.arena)
        except BaseException:
            os.close(shared.board)
            link.close()
            raise
        try:
            self._board_view = ReaderView(shared.board)
        except BaseException:
            self._arena.close()
            link.close()
            raise
        self._board = BoardReader(self._board_view)
        self._copier = Copier(dtype)

    @classmethod
    def open(cls, name: str, folder: str, secret: bytes, dtype: DType) -> Region:
        """Maps the memory behind a local socket. Blocks; raises OSError or ValueError if that fails."""
        link, grant = local_link.connect(name, folder, secret)
        return cls(link, grant, name, dtype)

    def watch(self, on_end: Callable[[], None]) -> None:
        """Calls `on_end` once, from the event loop, when the encoder is gone; the kernel tells, however it died."""
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(self._link)  # the encoder sends nothing more here, so any event is the end
            on_end()

        loop.add_reader(self._link, ended)

    def close(self) -> None:
        """Unmaps the memory and releases all leases there."""
        self._closed = True
        asyncio.get_running_loop().remove_reader(self._link)
        self._link.close()
        self._copier.close()
        self._board.close()
        self._board_view.close()
        self._arena.close()

    def prove(self, host: encoder_pb2.HostProof) -> None:
        """States the grant that came over the local socket."""
        host.grant = self._grant

    def takes(self, run: ArrivedRows) -> bool:
        """The run lies in this memory."""
        payload = run.payload
        return isinstance(payload, encoder_pb2.RowsHandle) and (payload.transport, payload.region) == (
            encoder_pb2.TRANSPORT_SHARED_MEMORY,
            self._name,
        )

    async def receive(self, run: ArrivedRows, target: memoryview) -> AsyncGenerator[int, None]:
        """Copies in parts, and releases the lease at the end in any case."""
        handle = run.payload
        assert isinstance(handle, encoder_pb2.RowsHandle)
        try:
            if handle.length != len(target) or not 0 <= handle.offset <= self._arena.size - handle.length:
                raise DataLoss("rows came in a wrong size")
            self._check_open()
            source = self._arena.view[handle.offset : handle.offset + handle.length]
            async with aclosing(self._copier.copy(target, source)) as parts:
                async for copied in parts:
                    self.check_lease(handle)
                    yield copied
        except DataLoss:
            self.check_lease(handle)  # what was read after the lease's end is invalid
            raise
        finally:
            self.release(handle)

    def _check_open(self) -> None:
        if self._closed:
            raise DataLoss("the encoder whose memory it was is gone")

    def check_lease(self, handle: encoder_pb2.RowsHandle) -> None:
        """To be called after a copy of a handle's rows: raises Unavailable if its lease has ended, and DataLoss if the
        encoder is gone."""
        self._check_open()
        if not self._board.holds(handle.slot, handle.number):
            raise Unavailable("the lease on the rows ended before they were read", reason=LEASE_EXPIRED)

    def release(self, handle: encoder_pb2.RowsHandle) -> None:
        """Gives a lease back."""
        try:
            self._link.send(RELEASE.pack(handle.number))
        except OSError:  # it is gone, or so stuck that its buffer is full; the lease then ends by its time
            return
