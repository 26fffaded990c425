"""An item's rows over several streams at once, each with a part of them.

This is for links on which one connection is the bottleneck: with round trips too long for its window, or faster than
one connection is served. Elsewhere it takes as long as one stream, or longer (docs/PERFORMANCE.md).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from functools import partial
from itertools import pairwise

from common.aio.merged import Send, merged
from common.errors import TwinlensError, Unavailable
from common.media.item import Header, Key, Options
from common.telemetry.stages import Stage
from llm_service.encoders.replica import Replica
from llm_service.encoders.settings import EncodeParams
from llm_service.encoders.stream import EncodeStream
from llm_service.encoders.transports.base import MirrorPlace
from llm_service.request import MediaItem


class ParallelStreams:
    """Streams of one item with consecutive parts; readers use it like an `EncodeStream`."""

    def __init__(self, streams: Sequence[EncodeStream], stretches: Sequence[tuple[int, int]]) -> None:
        self._streams = streams
        self._lengths = [end - first for first, end in stretches]

    @property
    def begun(self) -> bool:
        """Whether the encoder has begun on the item."""
        return any(stream.begun for stream in self._streams)

    def waited(self, *, with_room: bool = False) -> float:
        """As of `EncodeStream`, since the last row of any."""
        return max(stream.waited(with_room=with_room) for stream in self._streams)

    @property
    def longest_wait(self) -> float:
        """As of `EncodeStream`, of any."""
        return max(stream.longest_wait for stream in self._streams)

    async def arrived(self) -> None:
        """Waits for the first rows; later ones wait to be read."""
        await self._streams[0].arrived()

    @property
    def stages(self) -> dict[str, Stage]:
        """After the last row, the encoder's own stages, of the slowest stream for each."""
        found: dict[str, Stage] = {}
        for stream in self._streams:
            for name, stage in stream.stages.items():
                if name not in found or stage.seconds > found[name].seconds:
                    found[name] = stage
        return found

    async def rows(
        self, target: memoryview, mirror: MirrorPlace | None = None
    ) -> AsyncGenerator[tuple[int, int], None]:
        """As `EncodeStream.rows`: the yielded counts have no gaps, whatever has arrived behind them."""
        landed, told = [0] * len(self._streams), 0
        readers = [partial(self._read, part, target, mirror) for part in range(len(self._streams))]
        async with aclosing(merged(readers)) as news:
            async for part, rows, transport in news:
                landed[part] += rows
                if rows:
                    for stream in self._streams:
                        stream.wait.restart()
                more = self._without_gap(landed) - told
                told += more
                yield more, transport

    async def _read(
        self, part: int, target: memoryview, mirror: MirrorPlace | None, send: Send[tuple[int, int, int]]
    ) -> None:
        async with aclosing(self._streams[part].rows(target, mirror)) as runs:
            async for rows, transport in runs:
                await send((part, rows, transport))

    def _without_gap(self, landed: Sequence[int]) -> int:
        """How many rows have landed before the first one that has not."""
        whole = 0
        for rows, length in zip(landed, self._lengths, strict=True):
            whole += rows
            if rows < length:
                break
        return whole


async def open_parallel(
    replica: Replica, item: MediaItem, params: EncodeParams, header: Header, row_bytes: int, holds: ExitStack
) -> ParallelStreams | None:
    """Streams for the rows of an item from `params.first` on, closed by `holds`; None if a single stream is better, in
    which case `holds` is to be closed.

    They request the item by its key, so its own stream must stay open until they are: without it, the encoder need not
    have the key. If they fail, that stream can still bring all rows.
    """
    count = replica.parts((header.tokens - params.first) * row_bytes)
    if count < 2:
        return None
    stretches = _stretches(params.first, header.tokens, count)
    # The key stands for options and type as well.
    by_key = dataclasses.replace(item, source=Key(header.key), options=Options(), mime_type="")
    try:
        prepared = [
            await replica.prepare(by_key, dataclasses.replace(params, first=first, end=end)) for first, end in stretches
        ]
        streams = [holds.enter_context(replica.encode(each)) for each in prepared]
        async with asyncio.TaskGroup() as group:
            found = [group.create_task(stream.header()) for stream in streams]
    except Unavailable:
        return None
    except ExceptionGroup as failures:
        if failures.split(TwinlensError)[1] is not None:
            raise
        return None
    if not all(each.result().agrees(header) for each in found):
        return None
    return ParallelStreams(streams, stretches)


def _stretches(first: int, tokens: int, count: int) -> list[tuple[int, int]]:
    """Rows [first, tokens) in so many parts, each with its first row and its end."""
    missing = tokens - first
    return list(pairwise(first + missing * part // count for part in range(count + 1)))
