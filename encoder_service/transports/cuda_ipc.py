"""Rows by their place in a worker's own memory, under leases: they never leave the GPU's memory, or its links.

The same name is used for whatever `common.gpu.device_memory` has a driver for.
"""

from __future__ import annotations

from contextlib import ExitStack

from common.rows.wire import RowLayout
from encoder_service.engine.device_pool import DevicePools, Slice
from encoder_service.engine.leases import Lease, Leases
from encoder_service.transports.base import Chunks, RowRun, Sent, handle_of
from encoder_service.transports.local_socket import LocalSocket
from twinlens.v1 import encoder_pb2


class CudaIpc:
    """Offers slices of device pools to readers that hold a grant of the local socket and can read a pool's device."""

    number: encoder_pb2.Transport = encoder_pb2.TRANSPORT_CUDA_IPC

    def __init__(self, layout: RowLayout, leases: Leases, socket: LocalSocket, pools: DevicePools, sent: Sent) -> None:
        self._layout = layout
        self._leases = leases
        self._socket = socket
        self._pools = pools
        self._sent = sent

    def proved(self, host: encoder_pb2.HostProof) -> bool:
        """The caller shares this host, and says that it reads a device that has a pool."""
        return self._socket.knows(host.grant) and any(pool.device in host.gpu_uuids for pool in self._pools.alive)

    def takes(self, run: RowRun, host: encoder_pb2.HostProof) -> bool:
        """Every row of the run is in a pool of a device that the caller reads."""
        slices = covering(run)
        return bool(slices) and all(each.pool.device in host.gpu_uuids for each in slices)

    def has_room(self, run: RowRun) -> bool:
        """A lease can be had for each slice."""
        return len(covering(run)) <= self._leases.room

    async def send(self, run: RowRun, host: encoder_pb2.HostProof) -> Chunks:
        """A handle for each slice; ends when the reader has released all of them, or is gone.

        Raises Unavailable if a lease expired, or ended with its worker.
        """
        with ExitStack() as held:
            leases = [(each, held.enter_context(self._leases.take_slice(each, host.grant))) for each in covering(run)]
            first = run.first
            for each, lease in leases:
                handle = self._handle(each, lease)
                yield encoder_pb2.EncodeRows(item=run.item, first_row=first, count=each.rows, handle=handle)
                first += each.rows
            for each, lease in leases:
                await lease.returned()
                self._sent.add(self.number, each.rows, each.rows * self._layout.row_bytes)

    def _handle(self, piece: Slice, lease: Lease) -> encoder_pb2.RowsHandle:
        own = {"ipc_handle": piece.pool.handle, "row_sum": piece.row_sum, "slot": lease.slot, "number": lease.number}
        return handle_of(self.number, lease, piece.pool.name, 0, piece.rows * self._layout.row_bytes, **own)


def covering(run: RowRun) -> list[Slice]:
    """The slices that hold exactly a run's rows, in order; empty if some of them are in no pool.

    A run of rows 4–11 takes the slices that begin at 4 and at 8, if these have four rows each.
    """
    at, slices = run.first, list[Slice]()
    while at < run.end:
        piece = run.allocation.copies.get(at)
        if piece is None or not piece.kept:
            return []
        slices.append(piece)
        at += piece.rows
    return slices if at == run.end else []
