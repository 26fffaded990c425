"""What every transport can do: say whether it suits a caller, and turn an item's rows into messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol

from encoder_service.engine.store import Entry
from twinlens.v1 import encoder_pb2

Chunks = AsyncGenerator[encoder_pb2.EncodeRows | bytes, None]
"""Runs of rows, in order: messages, or whole `EncodeResponse`s that are serialized already."""


@dataclass(slots=True)
class Sent:
    """Totals since start, by transport number."""

    rows: Counter[encoder_pb2.Transport] = field(default_factory=Counter)
    bytes: Counter[encoder_pb2.Transport] = field(default_factory=Counter)

    def add(self, transport: encoder_pb2.Transport, rows: int, size: int) -> None:
        """Counts rows that have crossed."""
        self.rows[transport] += rows
        self.bytes[transport] += size


class Transport(Protocol):
    """One way for rows to cross. `number` is its name in the contract."""

    number: encoder_pb2.Transport

    def suits(self, host: encoder_pb2.HostProof, /) -> bool:
        """Whether a caller has proved that it can take rows in this way, and there is room for it now."""
        ...

    def send(self, item: int, entry: Entry, first: int, host: encoder_pb2.HostProof, /) -> Chunks:
        """Rows from `first` on of an entry, which its caller keeps pinned until the generator has ended."""
        ...
