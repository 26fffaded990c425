"""Rows inside the stream: chunks of about 1 MiB, each with its CRC-32C."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from common.arena import SharedBuffer
from common.row_frames import pack
from common.wire import RowLayout
from encoder_service.engine.store import Entry
from encoder_service.transports.base import Chunks, Sent
from twinlens.v1 import encoder_pb2


class Inline:
    """Copies rows into messages. Every caller can take them."""

    number: encoder_pb2.Transport = encoder_pb2.TRANSPORT_INLINE

    def __init__(self, buffer: SharedBuffer, layout: RowLayout, sent: Sent) -> None:
        self._buffer = buffer
        self._layout = layout
        self._sent = sent

    def suits(self, _host: encoder_pb2.HostProof) -> bool:
        """Always."""
        return True

    def landed(self, item: int, rows: Callable[[], memoryview], first: int, end: int) -> Iterator[bytes]:
        """Messages for rows [first, end) of an item that is not complete yet.

        `rows` is asked anew for each message where they are: what goes on between two may have been their end.
        """
        size = self._layout.row_bytes
        for start, count in self._layout.chunks(first, end):
            yield pack(item, start, count, rows()[start * size : (start + count) * size])
            self._sent.add(self.number, count, count * size)

    async def send(self, item: int, entry: Entry, first: int, _host: encoder_pb2.HostProof) -> Chunks:
        """One message for each run of rows."""
        size, data = self._layout.row_bytes, self._buffer.slice(entry.span)
        for start, count in self._layout.chunks(first, entry.header.tokens):
            yield pack(item, start, count, data[start * size : (start + count) * size])
            self._sent.add(self.number, count, count * size)
