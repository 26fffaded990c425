"""What every transport can do: tell whether a caller can receive rows by it, and send a run of rows.

`llm_service/encoders/transports/base.py` is the other side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Protocol

from encoder_service.engine.embedding_store import Allocation
from encoder_service.engine.leases import Lease
from twinlens.v1 import encoder_pb2

Chunks = AsyncGenerator[encoder_pb2.EncodeRows | bytes, None]
"""Runs of rows, in order: messages, or whole `EncodeResponse`s that are serialized already."""


@dataclass(frozen=True, slots=True)
class RowRun:
    """Rows [first, end) of an item, which are computed; later ones may not be yet. Row 0 is at the start of its
    bytes."""

    item: int
    allocation: Allocation
    first: int
    end: int


@dataclass(slots=True)
class Sent:
    """Totals since start, by transport number."""

    rows: Counter[encoder_pb2.Transport] = field(default_factory=Counter)
    bytes: Counter[encoder_pb2.Transport] = field(default_factory=Counter)

    def add(self, transport: encoder_pb2.Transport, rows: int, size: int) -> None:
        """Counts rows that have crossed."""
        self.rows[transport] += rows
        self.bytes[transport] += size


def handle_of(
    transport: encoder_pb2.Transport, lease: Lease, region: str, begin: int, end: int, **more: Any
) -> encoder_pb2.RowsHandle:
    """A handle for bytes [begin, end) of what is leased, in a reader's `region`; `more` are fields of this transport
    alone."""
    return encoder_pb2.RowsHandle(
        transport=transport,
        region=region,
        offset=lease.span.offset + begin,
        length=end - begin,
        lease=lease.name,
        expires_ms=round(lease.seconds * 1000),
        **more,
    )


class Transport(Protocol):
    """One way for rows to cross. `number` is its name in the contract."""

    number: encoder_pb2.Transport

    def proved(self, host: encoder_pb2.HostProof, /) -> bool:
        """Whether a caller has proved that it can take rows in this way."""
        ...

    def takes(self, run: RowRun, host: encoder_pb2.HostProof, /) -> bool:
        """Whether a run can be sent like this to a caller with this proof, however much is in transit; for that see
        `has_room`."""
        ...

    def has_room(self, run: RowRun, /) -> bool:
        """Whether a run that can go this way can go now."""
        ...

    def send(self, run: RowRun, host: encoder_pb2.HostProof, /) -> Chunks:
        """Sends a run, for which there is room, to a caller who can receive it; ends when the caller has read it.

        The generator pins the allocation from its first step to its end, so the run can be read whatever happens to the
        item's other rows. Several runs of one item may be sent, one after the other.
        """
        ...
