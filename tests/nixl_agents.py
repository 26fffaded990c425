"""NIXL agents for tests: over memory of their own, by a twin (`tests.nixl_twin`) or by the library where it is here."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from common.nixl.agent import MODULE, NixlAgent
from common.nixl.messages import AgentMemory
from common.shm.arena import Range, SharedBuffer
from tests.launch import descendants

TWIN = "tests.nixl_twin"
SIZE = 4 << 20

LIBRARY = any(importlib.util.find_spec(name) for name in ("nixl_cu13", "nixl_cu12"))
needs_library = pytest.mark.skipif(not LIBRARY, reason="NIXL is not installed")


@dataclass(frozen=True, slots=True)
class Held:
    """An agent, and the memory that it has registered."""

    agent: NixlAgent
    buffer: SharedBuffer

    @property
    def memory(self) -> AgentMemory:
        assert self.agent.memory is not None
        return self.agent.memory

    def bytes(self, offset: int, size: int) -> bytes:
        return bytes(self.buffer.slice(Range(offset, size)))


@asynccontextmanager
async def held(backend: str = "UCX", *, module: str = TWIN, fill: int = 0, size: int = SIZE) -> AsyncIterator[Held]:
    """An agent over `size` bytes that are all `fill`, which waits for answers as long as a busy machine needs."""
    buffer = SharedBuffer.create("test", size)
    buffer.view[:] = bytes([fill]) * size
    agent = NixlAgent(buffer, backend, answer_seconds=60.0, longest_pause=0.05, module=module)
    try:
        await agent.start()
        yield Held(agent, buffer)
    finally:
        await agent.stop()
        buffer.close()


def processes(pid: int = 0) -> list[int]:
    """Those of agents below a process, by default this one."""
    lines = descendants(pid or os.getpid())
    return sorted(pid for pid, line in lines.items() if any(f"-m {name} " in line for name in (TWIN, MODULE)))
