"""Engine processes: a spare one, if configured, and a watchdog for the one that serves."""

from __future__ import annotations

import asyncio
from typing import Self

from common.aio import tasks
from common.aio.watchdog import Watchdog
from common.process.children import Child, ChildDied
from common.process.status import HELD_UP_SECONDS, is_held_up
from llm_service.engine.messages import FromEngine

MODULE = "llm_service.engine"
_SILENCE_SECONDS = 3.0
"""Before the first look that finds it."""
_LOOK_SECONDS = 0.25


class SpareEngine:
    """Starts engines that run `module` and inherit `fds`, the first of which is the row arena's. The caller of `take`
    owns the engine; `stop` ends the spare one.

    An engine spends most of its start importing modules. A spare engine has done so and waits for its settings, at the
    cost of memory alone.
    """

    def __init__(self, *fds: int, wanted: bool, module: str = MODULE) -> None:
        self._fds = fds
        self._wanted = wanted
        self._module = module
        self._spare: Child[FromEngine] | None = None
        self._preparing: asyncio.Task[None] | None = None

    async def take(self) -> Child[FromEngine]:
        """A process that waits for its settings: the spare one, if it lives."""
        spare, self._spare = self._spare, None
        if spare is not None:
            if spare.process.returncode is None:
                return spare
            await spare.stop()
        return await self._start()

    def prepare(self) -> None:
        """Starts a spare engine, if one is configured and missing. To be called when the machine has time."""
        if self._wanted and self._spare is None and (self._preparing is None or self._preparing.done()):
            self._preparing = tasks.start(self._prepare(), "spare engine")

    async def stop(self) -> None:
        """Ends the spare one."""
        if self._preparing is not None:
            await asyncio.gather(self._preparing, return_exceptions=True)
        if self._spare is not None:
            self._spare.kill()
            await self._spare.stop()
            self._spare = None

    async def _prepare(self) -> None:
        self._spare = await self._start()

    async def _start(self) -> Child[FromEngine]:
        child: Child[FromEngine] = await Child.start(self._module, receives=FromEngine, fds=self._fds, stacks=True)
        return child


class Watch(Watchdog):
    """Watches the engine with this process id during the context. Raises ChildDied if the engine does not serve within
    `start_seconds`, is silent for too long after that, or spends more than `step_seconds` on one step, for example when
    a GPU hangs."""

    def __init__(self, pid: int, start_seconds: float, step_seconds: float) -> None:
        super().__init__(_LOOK_SECONDS)
        self._pid = pid
        self._serves = False
        self._busy = 0.0
        self._start_seconds = start_seconds
        self._step_seconds = step_seconds

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._last = self._loop.time()
        return self

    def heard(self, *, serves: bool, busy: float = 0.0) -> None:
        """The engine has said something; whether it serves by now, and for how many seconds it is at one step."""
        self._last, self._serves, self._busy = self._loop.time(), serves, busy

    def _look(self, late: float) -> Exception | None:
        now = self._loop.time()
        if late > _LOOK_SECONDS:  # this loop stood still, and so may have the engine: that time is no silence
            self._last = min(now, self._last + late)
        return ChildDied(self._why()) if self._is_lost(now - self._last) else None

    def _is_lost(self, silence: float) -> bool:
        if not self._serves:
            return silence > self._start_seconds
        if self._busy > self._step_seconds:
            return True
        # A beat comes every second, so a silent engine is frozen, unless the system reports contention: if more
        # processes want to run than there are cores, killing it would turn slowness into an outage.
        return silence > _SILENCE_SECONDS and (silence > HELD_UP_SECONDS or not is_held_up(self._pid))

    def _why(self) -> str:
        if not self._serves:
            return f"it was not ready after {self._start_seconds:g} seconds"
        if self._busy > self._step_seconds:
            return f"a step had not ended after {self._step_seconds:g} seconds"
        return "it is frozen"
