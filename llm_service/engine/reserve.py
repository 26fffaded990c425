"""Engine processes, and one in reserve where that is wanted.

An engine that takes the place of one that has died spends most of its start on importing what it is made of. One that
was started ahead of need has that behind it: it waits for its settings, and costs memory alone.
"""

from __future__ import annotations

import asyncio

from common import tasks
from common.processes import Child
from llm_service.engine.messages import FromEngine

MODULE = "llm_service.engine"


class Reserve:
    """Starts engines that run `module` and inherit `arena_fd`. Whoever takes one owns it; `stop` ends the one in
    reserve."""

    def __init__(self, arena_fd: int, *, ahead: bool, module: str = MODULE) -> None:
        self._arena_fd = arena_fd
        self._ahead = ahead
        self._module = module
        self._standby: Child[FromEngine] | None = None
        self._preparing: asyncio.Task[None] | None = None

    async def take(self) -> Child[FromEngine]:
        """A process that waits for its settings: the one in reserve, if it lives."""
        standby, self._standby = self._standby, None
        if standby is not None:
            if standby.process.returncode is None:
                return standby
            await standby.stop()
        return await self._start()

    def prepare(self) -> None:
        """Puts one in reserve, where that is wanted and none is there. For when the machine has time for it."""
        if self._ahead and self._standby is None and (self._preparing is None or self._preparing.done()):
            self._preparing = tasks.start(self._prepare(), "engine in reserve")

    async def stop(self) -> None:
        """Ends the one in reserve."""
        if self._preparing is not None:
            await asyncio.gather(self._preparing, return_exceptions=True)
        if self._standby is not None:
            self._standby.kill()
            await self._standby.stop()
            self._standby = None

    async def _prepare(self) -> None:
        self._standby = await self._start()

    async def _start(self) -> Child[FromEngine]:
        child: Child[FromEngine] = await Child.start(self._module, receives=FromEngine, fds=(self._arena_fd,))
        return child
