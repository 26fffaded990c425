"""KV blocks on their way out: read from the host's memory, a window of them at a time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from llm_service.engine_client.block_places import BlockPlaces
from llm_service.generation.events import Begun, Computed, Event

PART_BYTES = 1 << 20
"""Bytes of a block in one message: less than gRPC's window, so that the next part is read while one is sent."""
_WINDOW_BYTES = 64 << 20
"""Most bytes kept in host memory at a time for reading."""


@dataclass(frozen=True, slots=True)
class BlockPart:
    """`data` begins `offset` bytes after the start of a block."""

    identity: bytes
    offset: int
    data: bytes


class Lending:
    """The blocks of one prompt, of `block_size` tokens each, from number `first` on. Blocks that are no longer cached,
    or find no room on the host, are requested once more, with those after them."""

    def __init__(self, blocks: BlockPlaces, block_size: int, first: int) -> None:
        self._blocks = blocks
        self._block_size = block_size
        self._next = first
        self._identities: Sequence[bytes] = ()

    async def follow(self, events: AsyncIterator[Event]) -> AsyncGenerator[BlockPart]:
        """The blocks, in parts, each when the prompt's generation has computed it. Raises Unavailable if the engine
        ends meanwhile."""
        async for event in events:
            computed = 0
            match event:
                case Begun():
                    self._identities = event.layout.reusable(self._block_size)
                    computed = event.cached
                case Computed():
                    computed = event.tokens
            async with aclosing(self._up_to(computed // self._block_size)) as parts:
                async for part in parts:
                    yield part
        async with aclosing(self._up_to(len(self._identities))) as parts:  # blocks that found no room before
            async for part in parts:
                yield part

    async def _up_to(self, end: int) -> AsyncGenerator[BlockPart]:
        """The blocks before number `end` that were not lent yet."""
        while self._next < min(end, len(self._identities)) and (size := self._blocks.block_bytes):
            window = self._identities[self._next : min(end, self._next + max(1, _WINDOW_BYTES // size))]
            async with self._blocks.lent(window) as lent:
                for index, identity in enumerate(window[: lent.count]):
                    offset = 0
                    while offset < size:
                        data = lent.read(index, offset, PART_BYTES)
                        yield BlockPart(identity, offset, data)
                        offset += len(data)
            if not lent.count:
                return
            self._next += lent.count
