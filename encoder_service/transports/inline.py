"""Rows inside the stream: chunks of about 1 MiB, each with its CRC-32C."""

from __future__ import annotations

from common.rows.frames import pack
from common.rows.wire import RowLayout
from encoder_service.engine.embedding_store import EmbeddingStore
from encoder_service.transports.base import Chunks, RowRun, Sent
from twinlens.v1 import encoder_pb2


class Inline:
    """Copies rows into messages. Every caller can take them."""

    number: encoder_pb2.Transport = encoder_pb2.TRANSPORT_INLINE

    def __init__(self, store: EmbeddingStore, layout: RowLayout, sent: Sent) -> None:
        self._store = store
        self._layout = layout
        self._sent = sent

    def proved(self, _host: encoder_pb2.HostProof) -> bool:
        """Needs no proof."""
        return True

    def takes(self, _run: RowRun, _host: encoder_pb2.HostProof) -> bool:
        """Always."""
        return True

    def has_room(self, _run: RowRun) -> bool:
        """Always: a caller that does not read holds up its own stream alone."""
        return True

    async def send(self, run: RowRun, _host: encoder_pb2.HostProof) -> Chunks:
        """A message for each chunk."""
        size = self._layout.row_bytes
        with self._store.pinned(run.allocation) as data:
            for first, count in self._layout.chunks(run.first, run.end):
                yield pack(run.item, first, count, data[first * size : (first + count) * size])
                self._sent.add(self.number, count, count * size)
