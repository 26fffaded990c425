"""Tells an engine that is frozen from one that is merely slow, and ends the wait for one that never gets ready, or
never through with a step, as where a GPU hangs.

An engine sends a beat every second. One that is silent is frozen, unless the system says that it is held up
(`processes.is_held_up`): where more processes want to run than there are cores for, killing it would make an outage of
slowness.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from common.processes import HELD_UP_SECONDS, ChildDied, is_held_up

_SILENCE_SECONDS = 3.5
_LOOK_SECONDS = 0.25


class Watch:
    """A block in which the engine with this process id is listened to. It is left with ChildDied where the engine does
    not serve within `start_seconds`, or after that is silent for too long, or at one step for `step_seconds`."""

    def __init__(self, pid: int, start_seconds: float, step_seconds: float) -> None:
        self._pid = pid
        self._serves = False
        self._busy = 0.0
        self._start_seconds = start_seconds
        self._step_seconds = step_seconds
        self._limit = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._look_later()
        return self

    def heard(self, *, serves: bool, busy: float = 0.0) -> None:
        """The engine has said something; whether it serves by now, and for how many seconds it is at one step."""
        self._last, self._serves, self._busy = self._loop.time(), serves, busy

    def _look_later(self) -> None:
        self._due = self._loop.time() + _LOOK_SECONDS
        self._timer = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        stood_still = now - self._due > _LOOK_SECONDS  # this loop itself: what was said meanwhile is still to be read
        if not stood_still and self._is_lost(now - self._last):
            self._limit.reschedule(now)
        else:
            self._look_later()

    def _is_lost(self, silence: float) -> bool:
        if not self._serves:
            return silence > self._start_seconds
        if self._busy > self._step_seconds:
            return True
        return silence > _SILENCE_SECONDS and (silence > HELD_UP_SECONDS or not is_held_up(self._pid))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError:
            raise ChildDied(self._why()) from None

    def _why(self) -> str:
        if not self._serves:
            return f"it was not ready after {self._start_seconds:g} seconds"
        if self._busy > self._step_seconds:
            return f"it was not through with a step after {self._step_seconds:g} seconds"
        return "it is frozen"
