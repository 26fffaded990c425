"""Rows read straight from an encoder's memory, which this process has mapped; see `common.local_link`."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from common import local_link
from common.arena import ReaderView
from common.errors import DataLoss
from common.lease_board import BoardReader
from common.local_link import RELEASE
from common.wire import DType
from llm_service.encoders.transports.base import ArrivedRows
from llm_service.encoders.transports.copier import Copier
from twinlens.v1 import encoder_pb2


class Region:
    """One encoder's arena and lease board, mapped for reading, and the connection that they came over."""

    number: encoder_pb2.Transport = encoder_pb2.TRANSPORT_SHARED_MEMORY

    def __init__(self, link: socket.socket, handover: local_link.Handover, name: str, dtype: DType) -> None:
        self._link = link
        self._name = name
        self._grant = handover.grant
        self._closed = False
        try:
            self._arena = ReaderView(handover.arena)
        except BaseException:
            os.close(handover.board)
            link.close()
            raise
        try:
            self._board_view = ReaderView(handover.board)
        except BaseException:
            self._arena.close()
            link.close()
            raise
        self._board = BoardReader(self._board_view)
        self._copier = Copier(dtype)

    @classmethod
    def open(cls, name: str, folder: str, secret: bytes, dtype: DType) -> Region:
        """Maps the memory behind a local socket. Blocks; raises OSError or ValueError where it cannot be had."""
        link, handover = local_link.connect(name, folder, secret)
        return cls(link, handover, name, dtype)

    def watch(self, on_end: Callable[[], None]) -> None:
        """Calls `on_end` once, from the event loop, when the encoder is gone; the kernel tells, however it died."""
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(self._link)  # the encoder says nothing more here, so whatever comes is the end
            on_end()

        loop.add_reader(self._link, ended)

    def close(self) -> None:
        """Lets go of the memory and of everything leased there."""
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
            self.number,
            self._name,
        )

    async def read(self, run: ArrivedRows, target: memoryview) -> AsyncGenerator[int, None]:
        """Copies in parts, and gives the lease back at the end, whatever the end is."""
        handle = run.payload
        assert isinstance(handle, encoder_pb2.RowsHandle)
        try:
            if handle.length != len(target) or not 0 <= handle.offset <= self._arena.size - handle.length:
                raise DataLoss("rows came in a wrong size")
            self._check_open()
            source = self._arena.view[handle.offset : handle.offset + handle.length]
            async with aclosing(self._copier.copy(target, source)) as parts:
                async for copied in parts:
                    if not self.holds(handle):
                        raise DataLoss("the lease on the rows ended while they were read")
                    yield copied
        finally:
            self.release(handle)

    def _check_open(self) -> None:
        if self._closed:
            raise DataLoss("the encoder whose memory it was is gone")

    def holds(self, handle: encoder_pb2.RowsHandle) -> bool:
        """Whether the lease on what a handle is about still stands; asked after a copy."""
        return not self._closed and self._board.holds(handle.slot, handle.number)

    def release(self, handle: encoder_pb2.RowsHandle) -> None:
        """Gives a lease back."""
        try:
            self._link.send(RELEASE.pack(handle.number))
        except OSError:  # it is gone, or so stuck that its buffer is full; the lease then ends by its time
            return
