"""KV blocks on their way out: read from the host's memory, a window of them at a time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from llm_service.engine_client.block_places import BlockPlaces

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
    """The blocks of one prompt, from number `first` on, in the order of their `identities`. Blocks that are no longer
    cached, or find no room on the host, are requested once more, with those after them."""

    def __init__(self, blocks: BlockPlaces, first: int) -> None:
        self.identities: Sequence[bytes] = ()
        self._blocks = blocks
        self._next = first

    async def up_to(self, end: int) -> AsyncGenerator[BlockPart]:
        """The blocks before number `end` that were not lent yet, in parts. Raises Unavailable if the engine ends
        meanwhile."""
        while self._next < min(end, len(self.identities)) and (size := self._blocks.block_bytes):
            window = self.identities[self._next : min(end, self._next + max(1, _WINDOW_BYTES // size))]
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
