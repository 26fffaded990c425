"""KV blocks from and for other services: the front's part. It reads and writes them in memory shared with all ranks, at
the places that the engine names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from common.errors import Unavailable
from common.shm.arena import SharedBuffer
from llm_service.engine.messages import (
    AwaitBlocks,
    BlocksAnswer,
    BlocksArrived,
    BlocksRead,
    FindBlocks,
    LendBlocks,
)
from llm_service.engine_client.handover import engine_lost

BlocksMessage = FindBlocks | LendBlocks | BlocksRead | AwaitBlocks | BlocksArrived


@dataclass(slots=True)
class AwaitedBlocks:
    """Places for blocks that come, in order, as the engine of this `life` has them; `arrived` of them are complete."""

    count: int
    life: int
    _places: BlockPlaces
    _numbers: Sequence[int]
    arrived: int = 0
    _written: int = 0

    def write(self, offset: int, data: bytes) -> None:
        """Appends data to the block after those that are complete. Raises ValueError if `offset` is not where the last
        data ended, or the data exceed the block; Unavailable if the engine has ended."""
        self._places.check(self.life)
        size = self._places.block_bytes
        if offset != self._written or offset + len(data) > size or self.arrived >= self.count:
            raise ValueError("what comes is not what comes next")
        self._places.write(self._numbers[self.arrived], offset, data)
        self._written += len(data)
        if self._written == size:
            self.arrived, self._written = self.arrived + 1, 0


@dataclass(frozen=True, slots=True)
class LentBlocks:
    """Blocks that may be read: the first `count` of those requested."""

    count: int
    _places: BlockPlaces
    _numbers: Sequence[int]
    _life: int

    def read(self, index: int, offset: int, size: int) -> bytes:
        """Up to `size` bytes of a block. Raises Unavailable if the engine has ended."""
        self._places.check(self._life)
        return self._places.read(self._numbers[index], offset, size)


class BlockPlaces:
    """The places of `ranks` ranks in `buffer`, which has `rank_bytes` for each; a block has the same number of bytes on
    every rank. `send` sends to the current engine, and raises Unavailable if there is none."""

    def __init__(
        self, buffer: SharedBuffer, ranks: int, rank_bytes: int, send: Callable[[BlocksMessage], None]
    ) -> None:
        self.buffer = buffer
        self._ranks = ranks
        self._rank_bytes = rank_bytes
        self._send = send
        self._place_bytes = 0
        self._ids = 0
        self._life = 0
        self._waiting: dict[int, asyncio.Future[BlocksAnswer]] = {}
        self.lent_blocks = 0
        self.received_blocks = 0
        """Totals since start."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all ranks; 0 if no engine serves, or it does not exchange blocks."""
        return self._ranks * self._place_bytes

    def opened(self, place_bytes: int) -> None:
        """An engine serves, whose places have so many bytes on each rank."""
        self._place_bytes = place_bytes

    def lost(self) -> None:
        """The engine has ended, and its exchanges with it."""
        self._place_bytes = 0
        self._life += 1
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(engine_lost())

    def take(self, answer: BlocksAnswer) -> None:
        """The engine has answered."""
        if (waiting := self._waiting.pop(answer.id, None)) is not None and not waiting.done():
            waiting.set_result(answer)

    def check(self, life: int) -> None:
        """Raises Unavailable unless that engine still serves."""
        if life != self._life:
            raise engine_lost()

    async def found(self, identities: Sequence[bytes]) -> int:
        """How many of a prompt's blocks are cached, from the first one on."""
        return (await self._ask(FindBlocks(self._next(), list(identities)))).found

    @asynccontextmanager
    async def lent(self, identities: Sequence[bytes]) -> AsyncGenerator[LentBlocks]:
        """Lends the leading blocks that are cached and find room on the host, for the duration of the context."""
        message, life = LendBlocks(self._next(), list(identities)), self._life
        try:
            places = (await self._ask(message)).places
            self.lent_blocks += len(places)
            yield LentBlocks(len(places), self, places, life)
        finally:
            self._tell(life, BlocksRead(message.id))

    @asynccontextmanager
    async def awaited(self, identities: Sequence[bytes]) -> AsyncGenerator[AwaitedBlocks]:
        """Reserves places for as many of these blocks as there is room for. At the end of the context, prompts can find
        those that arrived."""
        message, life = AwaitBlocks(self._next(), list(identities)), self._life
        awaited: AwaitedBlocks | None = None
        try:
            places = (await self._ask(message)).places
            awaited = AwaitedBlocks(len(places), life, self, places)
            yield awaited
        finally:
            arrived = awaited.arrived if awaited is not None else 0
            self.received_blocks += arrived
            self._tell(life, BlocksArrived(message.id, arrived))

    def read(self, place: int, offset: int, size: int) -> bytes:
        """Up to `size` bytes of a block from `offset` on; no more than one rank's."""
        rank, within = divmod(offset, self._place_bytes)
        begin = rank * self._rank_bytes + place * self._place_bytes
        return bytes(self.buffer.view[begin + within : begin + min(within + size, self._place_bytes)])

    def write(self, place: int, offset: int, data: bytes) -> None:
        """Writes part of a block into its place on each rank."""
        rest = memoryview(data)
        while rest:
            rank, within = divmod(offset, self._place_bytes)
            begin = rank * self._rank_bytes + place * self._place_bytes + within
            count = min(len(rest), self._place_bytes - within)
            self.buffer.view[begin : begin + count] = rest[:count]
            rest, offset = rest[count:], offset + count

    def _next(self) -> int:
        self._ids += 1
        return self._ids

    async def _ask(self, message: FindBlocks | LendBlocks | AwaitBlocks) -> BlocksAnswer:
        answer: asyncio.Future[BlocksAnswer] = asyncio.get_running_loop().create_future()
        self._send(message)
        self._waiting[message.id] = answer
        try:
            return await answer
        finally:
            self._waiting.pop(message.id, None)

    def _tell(self, life: int, message: BlocksRead | BlocksArrived) -> None:
        """Ends an exchange, if the engine that it began with still serves."""
        if life == self._life:
            try:
                self._send(message)
            except Unavailable:  # this engine does not know the exchange
                return
