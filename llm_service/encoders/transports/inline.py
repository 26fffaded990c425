"""Rows inside the stream, each run with its CRC-32C."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from common.errors import DataLoss
from common.rows.frames import RowsFrame
from common.rows.wire import DType, all_finite, crc32c
from llm_service.encoders.transports.base import ArrivedRows
from twinlens.v1 import encoder_pb2


class Inline:
    """Copies rows out of messages. It works everywhere."""

    number: encoder_pb2.Transport = encoder_pb2.TRANSPORT_INLINE
    splits = True
    after_break = True
    leased = False

    def __init__(self, dtype: DType) -> None:
        self._dtype = dtype

    @property
    def usable(self) -> bool:
        """Always."""
        return True

    async def on_info(self, info: encoder_pb2.EncoderServiceGetInfoResponse) -> None:
        """Nothing needs to be opened."""

    def close(self) -> None:
        """Nothing is open."""

    def prove(self, host: encoder_pb2.HostProof) -> None:
        """Nothing needs to be proved."""

    def takes(self, run: ArrivedRows) -> bool:
        """The run has its bytes with it."""
        return isinstance(run.payload, RowsFrame)

    async def receive(self, run: ArrivedRows, target: memoryview) -> AsyncGenerator[int, None]:
        """One piece: a message has about a megabyte, which the event loop can copy.

        Numbers are checked at their destination, where they are aligned, and still in the cache.
        """
        assert isinstance(run.payload, RowsFrame)
        data = run.payload.data
        if len(data) != len(target):
            raise DataLoss("rows came in a wrong size")
        if crc32c(data) != run.payload.crc:
            raise DataLoss("rows were damaged on the way")
        target[:] = data
        if not all_finite(target, self._dtype):
            raise DataLoss("an encoder sent numbers that are not finite")
        yield len(data)
