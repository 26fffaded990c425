"""KV blocks on their way out: read from the host's memory, a window of them at a time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from llm_service.engine.block_places import BlockPlaces

PART_BYTES = 1 << 20
"""Of a block, what one message holds: less than gRPC's window, so that the next part is read while one is sent."""
_WINDOW_BYTES = 64 << 20
"""What is kept on the host at a time to be read."""


@dataclass(frozen=True, slots=True)
class BlockPart:
    """`data` stands `offset` bytes behind the beginning of a block."""

    identity: bytes
    offset: int
    data: bytes


async def lend(blocks: BlockPlaces, identities: Sequence[bytes]) -> AsyncGenerator[BlockPart]:
    """The blocks of these identities, in order, up to the first that is not cached any more, or finds no room on the
    host. Raises Unavailable where the engine ends meanwhile."""
    while identities and blocks.block_bytes:
        window = identities[: max(1, _WINDOW_BYTES // blocks.block_bytes)]
        async with blocks.lent(window) as lent:
            for index, identity in enumerate(window[: lent.count]):
                offset = 0
                while offset < blocks.block_bytes:
                    data = lent.read(index, offset, PART_BYTES)
                    yield BlockPart(identity, offset, data)
                    offset += len(data)
        if not lent.count:
            return
        identities = identities[lent.count :]
