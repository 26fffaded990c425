"""Rows by their place in the store's own memory, under a lease: no byte of them goes through a socket."""

from __future__ import annotations

from common.rows.wire import RowLayout
from encoder_service.engine.leases import Leases
from encoder_service.transports.base import Chunks, RowRun, Sent, handle_of
from encoder_service.transports.local_socket import LocalSocket
from twinlens.v1 import encoder_pb2


class SharedMemory:
    """Offers ranges of the store's arena to readers that hold a grant of the local socket."""

    number: encoder_pb2.Transport = encoder_pb2.TRANSPORT_SHARED_MEMORY

    def __init__(self, layout: RowLayout, leases: Leases, socket: LocalSocket, sent: Sent) -> None:
        self._layout = layout
        self._leases = leases
        self._socket = socket
        self._sent = sent

    def proved(self, host: encoder_pb2.HostProof) -> bool:
        """The caller has our memory mapped."""
        return self._socket.knows(host.grant)

    def takes(self, _run: RowRun, _host: encoder_pb2.HostProof) -> bool:
        """Always: every row is in the store's arena."""
        return True

    def has_room(self, _run: RowRun) -> bool:
        """A lease can be had."""
        return self._leases.room > 0

    async def send(self, run: RowRun, host: encoder_pb2.HostProof) -> Chunks:
        """One handle for the run; ends when the reader has released it, or is gone.

        So a reader has one lease of an item at a time, and rows written meanwhile are its next run. Raises Unavailable
        if the lease expired.
        """
        size, count = self._layout.row_bytes, run.end - run.first
        with self._leases.take(run.allocation, host.grant) as lease:
            posted = {"slot": lease.slot, "number": lease.number}
            handle = handle_of(self.number, lease, self._socket.name, run.first * size, run.end * size, **posted)
            yield encoder_pb2.EncodeRows(item=run.item, first_row=run.first, count=count, handle=handle)
            await lease.returned()
        self._sent.add(self.number, count, count * size)
