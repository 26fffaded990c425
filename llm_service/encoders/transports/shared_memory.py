"""Rows read straight from an encoder's memory, which this process has mapped; see `common.local_link`."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Callable

import numpy as np

from common import local_link, tasks
from common.arena import ReaderView
from common.errors import DataLoss
from common.lease_board import BoardReader
from common.local_link import RELEASE
from common.wire import DType, all_finite
from llm_service.encoders.transports.base import Run
from twinlens.v1 import encoder_pb2

_PIECE = 16 << 20
"""Bytes copied by one call of a thread: prefill may begin with them while the rest is being copied."""

_BLOCK = 512 << 10
"""Bytes that are copied, and then checked, while they are in a core's cache."""

_THREADS = max(1, min(4, os.cpu_count() or 1))

_AT_ONCE = 256 << 10
"""Bytes that are copied faster than a thread is asked to."""


class Region:
    """One encoder's arena and lease board, mapped for reading, and the connection that they came over."""

    number: encoder_pb2.Transport = encoder_pb2.TRANSPORT_SHARED_MEMORY

    def __init__(self, link: socket.socket, handover: local_link.Handover, name: str, dtype: DType) -> None:
        self._link = link
        self._name = name
        self._dtype = dtype
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
        self._board.close()
        self._board_view.close()
        self._arena.close()

    def prove(self, host: encoder_pb2.HostProof) -> None:
        """States the grant that came over the local socket."""
        host.grant = self._grant

    def takes(self, run: Run) -> bool:
        """The run lies in this memory."""
        payload = run.payload
        return isinstance(payload, encoder_pb2.RowsHandle) and (payload.transport, payload.region) == (
            self.number,
            self._name,
        )

    async def read(self, run: Run, target: memoryview) -> AsyncGenerator[int, None]:
        """Copies in pieces, and gives the lease back at the end, whatever the end is."""
        handle = run.payload
        assert isinstance(handle, encoder_pb2.RowsHandle)
        try:
            if handle.length != len(target) or not 0 <= handle.offset <= self._arena.size - handle.length:
                raise DataLoss("rows came in a wrong size")
            for start in range(0, handle.length, _PIECE):
                end = min(start + _PIECE, handle.length)
                self._check_open()
                await self._copy(self._arena.view[handle.offset + start : handle.offset + end], target[start:end])
                self._check_open()
                if not self._board.holds(handle.slot, handle.number):
                    raise DataLoss("the lease on the rows ended while they were read")
                yield end - start
        finally:
            self._release(handle.number)

    def _check_open(self) -> None:
        if self._closed:
            raise DataLoss("the encoder whose memory it was is gone")

    async def _copy(self, source: memoryview, target: memoryview) -> None:
        """Copies a piece; a large one by several threads, since one core does not use up the memory's speed."""
        if len(target) <= _AT_ONCE:
            _copy_part(target, source, self._dtype)
            return
        part = -(-len(target) // _THREADS // _BLOCK) * _BLOCK
        parts = [(target[at : at + part], source[at : at + part]) for at in range(0, len(target), part)]
        ends = await asyncio.gather(
            *(tasks.in_thread(_copy_part, *views, self._dtype) for views in parts), return_exceptions=True
        )
        for end in ends:
            if end is not None:
                raise end

    def _release(self, number: int) -> None:
        try:
            self._link.send(RELEASE.pack(number))
        except OSError:  # it is gone, or so stuck that its buffer is full; the lease then ends by its time
            return


def _copy_part(target: memoryview, source: memoryview, dtype: DType) -> None:
    """Copies without holding the interpreter, in blocks that the cache still has when they are checked; raises DataLoss
    at numbers that are not finite."""
    with target, source:
        for start in range(0, len(target), _BLOCK):
            with target[start : start + _BLOCK] as block:
                np.copyto(np.frombuffer(block, np.uint8), np.frombuffer(source[start : start + _BLOCK], np.uint8))
                if not all_finite(block, dtype):
                    raise DataLoss("an encoder sent numbers that are not finite")
