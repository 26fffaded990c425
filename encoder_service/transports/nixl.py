"""Rows that callers' NIXL agents read directly from the store's memory, under leases, from any host."""

from __future__ import annotations

from common.aio.tasks import in_thread
from common.nixl.agent import NixlAgent
from common.rows.wire import RowLayout, crc32c
from encoder_service.engine.embedding_store import EmbeddingStore
from encoder_service.engine.leases import Leases
from encoder_service.transports.base import Chunks, RowRun, Sent, handle_of
from twinlens.v1 import encoder_pb2

_PART_BYTES = 4 << 20
"""Bytes that are read and checked in one piece: the contract's maximum."""

_OWNER = b""
"""Leases that end by their name, their time, or with the stream: no connection tells that a reader is gone."""


class Nixl:
    """Offers ranges of the store's arena, which `agent` has registered, to callers whose agent is connected."""

    number: encoder_pb2.Transport = encoder_pb2.TRANSPORT_NIXL

    def __init__(self, store: EmbeddingStore, layout: RowLayout, leases: Leases, agent: NixlAgent, sent: Sent) -> None:
        self._store = store
        self._layout = layout
        self._leases = leases
        self._agent = agent
        self._sent = sent

    def proved(self, host: encoder_pb2.HostProof) -> bool:
        """Whether the caller is connected to the current agent."""
        memory = self._agent.memory
        return memory is not None and memory.agent == host.nixl_agent

    def takes(self, _run: RowRun, host: encoder_pb2.HostProof) -> bool:
        """Every row is in the store's arena; the agent may be another one since."""
        return self.proved(host)

    def has_room(self, _run: RowRun) -> bool:
        """A lease can be had."""
        return self._leases.room > 0

    async def send(self, run: RowRun, host: encoder_pb2.HostProof) -> Chunks:
        """One handle for the run; ends when the reader has released it.

        Raises Unavailable if the lease expired.
        """
        size, count = self._layout.row_bytes, run.end - run.first
        with self._leases.take(run.allocation, _OWNER) as lease:
            data = self._store.buffer.slice(lease.span)  # pinned by the lease
            begin, end = run.first * size, run.end * size
            parts = {"part_bytes": _PART_BYTES, "part_crc32c": await in_thread(_part_sums, data[begin:end])}
            handle = handle_of(self.number, lease, host.nixl_agent, begin, end, **parts)
            yield encoder_pb2.EncodeRows(item=run.item, first_row=run.first, count=count, handle=handle)
            await lease.returned()
        self._sent.add(self.number, count, count * size)


def _part_sums(data: memoryview) -> list[int]:
    with data:
        return [crc32c(data[at : at + _PART_BYTES]) for at in range(0, len(data), _PART_BYTES)]
