"""One item at one encoder: the stream that is open for it, or several that bring a stretch of its rows each."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from typing import TypeAlias

from common.media.item import Header
from common.telemetry.stages import Stage
from llm_service.encoders.parallel_streams import ParallelStreams, open_parallel
from llm_service.encoders.replica import Replica
from llm_service.encoders.settings import EncodeParams
from llm_service.encoders.stream import EncodeStream
from llm_service.request import MediaItem

RowStream: TypeAlias = EncodeStream | ParallelStreams
"""Delivers an item's rows."""


class Attempt:
    """One attempt, number `number`, to get an item from `replica`. Its creator closes it.

    `opened` is when it was sent, on the breaker's clock. `header` is the encoder's last header of the item.
    """

    def __init__(self, replica: Replica, number: int) -> None:
        self.replica = replica
        self.number = number
        self.opened = replica.breaker.now()
        self.stream: RowStream | None = None
        self.header: Header | None = None
        self._holds = ExitStack()

    @property
    def begun(self) -> bool:
        """The encoder has begun on the item."""
        return self.stream is not None and self.stream.begun

    @property
    def owes(self) -> str:
        """What is expected next: the item's `header` or its `rows`."""
        return "header" if self.header is None else "rows"

    @property
    def waited(self) -> float:
        """Seconds for which the encoder has had the item without sending a row, or the next one, except for time in
        which it waits for others. An encoder that is slow with items it has is to blame for those waiting for room."""
        return 0.0 if self.stream is None else self.stream.waited(with_room=self.replica.pace.slow)

    @property
    def longest_wait(self) -> float:
        """The longest of these times before a row."""
        return 0.0 if self.stream is None else self.stream.longest_wait

    @property
    def stages(self) -> dict[str, Stage]:
        """After the last row, the encoder's own."""
        return {} if self.stream is None else self.stream.stages

    async def open(self, item: MediaItem, params: EncodeParams) -> Header:
        """Sends the item and returns its header; a stream that is open is closed before. Raises as
        `EncodeStream.header`."""
        self.close()
        prepared = await self.replica.prepare(item, params)
        self.stream = stream = self._holds.enter_context(self.replica.encode(prepared))
        del prepared  # its item may be large, and the wait long
        self.header = header = await stream.header()
        return header

    async def parallelise(self, item: MediaItem, params: EncodeParams, header: Header, row_bytes: int) -> None:
        """Opens several streams for the remaining rows instead of the current one, if that is better."""
        assert self.header is not None
        there = dataclasses.replace(header, key=self.header.key)
        with ExitStack() as parts:
            opened = await open_parallel(self.replica, item, params, there, row_bytes, parts)
            if opened is not None:
                self._holds.close()
                self.stream, self._holds = opened, parts.pop_all()

    async def first_rows(self) -> RowStream:
        """Waits for the first rows, or until there are none; returns what delivers them."""
        assert self.stream is not None
        await self.stream.arrived()
        return self.stream

    def close(self) -> None:
        """Closes everything without waiting, so that no cancellation can interrupt it."""
        self.stream = None
        self._holds.close()
