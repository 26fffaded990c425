"""Rows that this service's NIXL agent reads from an encoder's memory, on any host."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable

from common.aio import tasks
from common.errors import LEASE_EXPIRED, DataLoss, Unavailable
from common.nixl.agent import NixlError
from common.nixl.messages import AgentMemory
from common.shm.arena import Range
from common.telemetry import log
from llm_service.encoders.transports.base import ArrivedRows
from llm_service.encoders.transports.nixl_reader import PART_BYTES, NixlReader
from twinlens.v1 import encoder_pb2

_log = log.get("encoders")
_CONNECT_SECONDS = 0.5
_LONGEST_PAUSE = 300.0


class Nixl:
    """The memory of one encoder's agent. After a failure it is tried again after a pause, which grows; until then rows
    come by another transport. `release` releases a lease by name in the background; its result tells whether the lease
    was still valid, None if unknown."""

    number: encoder_pb2.Transport = encoder_pb2.TRANSPORT_NIXL
    splits = False
    after_break = False
    leased = True

    def __init__(self, address: str, reader: NixlReader, release: Callable[[str], Awaitable[bool | None]]) -> None:
        self._address = address
        self._reader = reader
        self._release = release
        self._memory: AgentMemory | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._pause = 0.0
        self._again = 0.0
        self._anew = False

    @property
    def usable(self) -> bool:
        """Whether the agents are connected, and no read from there has failed since."""
        memory = self._memory
        if memory is None or self._anew or not self._reader.agent.is_connected(memory.agent):
            return False
        return time.monotonic() >= self._again

    async def on_info(self, info: encoder_pb2.EncoderServiceGetInfoResponse) -> None:
        """Connects with the encoder's agent, if it or ours has changed, or a read has failed, since the library may
        have forgotten it. If that takes long, it continues in the background."""
        told, agent = info.nixl_agent, self._reader.agent
        if self._memory is not None and self._memory.agent != told.name:
            self._let_go()  # of an agent that has ended; the next one may not fail
        if self._anew and time.monotonic() >= self._again:
            agent.disconnect(told.name)
            self._anew = False
        if not told.name or agent.memory is None or agent.is_connected(told.name) or time.monotonic() < self._again:
            return
        if self._connecting is None or self._connecting.done():
            memory = AgentMemory(told.name, told.backend, told.metadata, told.base, told.bytes)
            self._connecting = tasks.start(self._connect(memory), "connect by NIXL")
        await asyncio.wait({self._connecting}, timeout=_CONNECT_SECONDS)

    async def _connect(self, memory: AgentMemory) -> None:
        try:
            await self._reader.agent.connect(memory)
        except NixlError as error:
            self._failed(error)
            return
        self._memory = memory
        _log.info("this encoder's memory is read by NIXL", address=self._address)

    def close(self) -> None:
        """The encoder is gone."""
        self._let_go()
        self._pause, self._again = 0.0, 0.0

    def _let_go(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        if self._memory is not None:
            self._reader.agent.disconnect(self._memory.agent)
        self._memory, self._anew = None, False

    def prove(self, host: encoder_pb2.HostProof) -> None:
        """Names the encoder's agent that ours is connected with."""
        if self._memory is not None:
            host.nixl_agent = self._memory.agent

    def takes(self, run: ArrivedRows) -> bool:
        """The run lies in the memory of that agent."""
        handle = run.payload
        if not isinstance(handle, encoder_pb2.RowsHandle) or self._memory is None:
            return False
        return (handle.transport, handle.region) == (self.number, self._memory.agent)

    async def receive(self, run: ArrivedRows, target: memoryview) -> AsyncGenerator[int, None]:
        """Reads parts concurrently, checks and copies each, and yields them in order. The lease is released at the end
        in any case, and nobody writes to `target` any more. Raises Unavailable if rows are damaged and the lease had
        expired: other rows were there by then."""
        handle, memory = run.payload, self._memory
        assert isinstance(handle, encoder_pb2.RowsHandle)
        assert memory is not None
        parts: list[asyncio.Task[int]] = []
        returned: Awaitable[bool | None] | None = None
        try:
            spans = _parts(handle, len(target), memory)
            for span, crc in zip(spans, handle.part_crc32c, strict=True):
                at = span.offset - handle.offset
                parts.append(asyncio.create_task(self._part(memory, span, crc, target[at : at + span.size])))
            try:
                for part in parts:
                    yield await part
            except DataLoss as error:
                if isinstance(error.__cause__, NixlError):
                    raise
                returned = self._release(handle.lease)
                if await returned is False:
                    late = "the lease on the rows ended before they were read"
                    raise Unavailable(late, reason=LEASE_EXPIRED) from error
                self._failed(error)
                raise
            self._pause = 0.0
        finally:
            for part in parts:
                part.cancel()
            try:
                await asyncio.gather(*parts, return_exceptions=True)  # it waits, cancelled or not
            finally:
                if returned is None:
                    self._release(handle.lease)

    async def _part(self, memory: AgentMemory, span: Range, crc: int, target: memoryview) -> int:
        try:
            async with self._reader.part(memory, span) as data:
                return await self._reader.copier.copy_checked(target, data, crc)
        except NixlError as error:
            self._failed(error)
            self._anew = True
            raise DataLoss("rows could not be read from the encoder's memory") from error

    def _failed(self, error: NixlError | DataLoss) -> None:
        """The parts of one run that fail together are one failure."""
        if time.monotonic() < self._again:
            return
        self._pause = min(max(1.0, 2 * self._pause), _LONGEST_PAUSE)
        self._again = time.monotonic() + self._pause
        _log.warning("no rows by NIXL", address=self._address, cause=str(error), retry_seconds=self._pause)


def _parts(handle: encoder_pb2.RowsHandle, size: int, memory: AgentMemory) -> list[Range]:
    """Where the parts of a run are; raises DataLoss if the handle contradicts itself, or exceeds the memory."""
    step, end = handle.part_bytes, handle.offset + handle.length
    if handle.length != size or not 0 <= handle.offset <= end <= memory.size:
        raise DataLoss("rows came in a wrong size")
    if not 0 < step <= PART_BYTES or len(handle.part_crc32c) != -(-size // step):
        raise DataLoss("rows came in parts of a wrong size")
    return [Range(at, min(step, end - at)) for at in range(handle.offset, end, step)]
