"""Parts of rows that this service's NIXL agent reads from encoders' memory, into a memory of their own, where they are
checked before they are copied to their place: a cancelled transfer may still write, as long as its agent lives. A place
is reused when its transfer has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.nixl.agent import MODULE, NixlAgent
from common.nixl.messages import AgentMemory
from common.rows.wire import DType
from common.shm.arena import Range, SharedBuffer
from llm_service.encoders.transports.copier import Copier

PART_BYTES = 4 << 20
"""Bytes of the largest part."""


class NixlReader:
    """Places for as many parts as fit into `size` bytes, at least one. `start` and `stop` are called by the owner.

    Raises OSError if the memory cannot be allocated.
    """

    def __init__(self, backend: str, size: int, dtype: DType, *, module: str = MODULE) -> None:
        places = max(1, size // PART_BYTES)
        self._buffer = SharedBuffer.create("twinlens-nixl", places * PART_BYTES)
        self.agent = NixlAgent(self._buffer, backend, module=module)
        self.copier = Copier(dtype)
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for place in range(places):
            self._free.put_nowait(place * PART_BYTES)

    async def start(self) -> None:
        """Starts the agent; raises NixlError if it cannot."""
        await self.agent.start()

    async def stop(self) -> None:
        """Stops the agent and its reads."""
        await self.agent.stop()
        self.copier.close()
        self._buffer.close()

    @property
    def places(self) -> int:
        """How many parts can be read at once."""
        return self._buffer.size // PART_BYTES

    @property
    def free(self) -> int:
        """How many of them could begin now."""
        return self._free.qsize()

    @asynccontextmanager
    async def part(self, memory: AgentMemory, span: Range) -> AsyncIterator[memoryview]:
        """The bytes of a range of an agent's memory, at most PART_BYTES, for the duration of the context; waits for
        room.

        Raises NixlError if they do not come.
        """
        place = await self._free.get()
        landing = self.agent.read(memory, span.offset, place, span.size)
        try:
            await asyncio.shield(landing)
            with self._buffer.slice(Range(place, span.size)) as data:
                yield data
        finally:
            landing.add_done_callback(lambda _: self._free.put_nowait(place))
