"""Rows inside the stream: chunks of about 1 MiB, each with its CRC-32C."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from common.wire import RowLayout, crc32c
from encoder_service.item import Header
from twinlens.v1 import encoder_pb2


class Transport(Protocol):
    """Turns an item's rows into messages. `data` stays where it is for as long as the iterator is used."""

    def send(self, item: int, header: Header, data: memoryview) -> Iterator[encoder_pb2.EncodeRows]: ...


class Inline:
    """Copies rows into messages."""

    def __init__(self, layout: RowLayout) -> None:
        self._layout = layout

    def send(self, item: int, header: Header, data: memoryview) -> Iterator[encoder_pb2.EncodeRows]:
        """Messages for rows 0 to `header.tokens`, in order."""
        size = self._layout.row_bytes
        for first, count in self._layout.chunks(0, header.tokens):
            chunk = bytes(data[first * size : (first + count) * size])
            yield encoder_pb2.EncodeRows(item=item, first_row=first, count=count, data=chunk, crc32c=crc32c(chunk))
