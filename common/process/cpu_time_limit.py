"""Distinguishes a process that uses up its time for a piece of work, which is the work's fault, from one that could not
run: it was stopped, or shares its cores with too many others. On a stalled machine the clock cannot tell these apart,
but the kernel's count of processor time can."""

from __future__ import annotations

from typing import Self

from common.aio.watchdog import Watchdog
from common.process.status import HELD_UP_SECONDS, cpu_seconds, is_held_up, is_stopped

_STILL_SECONDS = 3.0
_LOOK_SECONDS = 0.1
_LATE_SECONDS = 0.05


class ProcessStalled(Exception):
    """A process did nothing although this host did not hold it up: it was `stopped`, or waits for something that never
    comes."""

    def __init__(self, *, stopped: bool) -> None:
        super().__init__()
        self.stopped = stopped


class CpuTimeLimit(Watchdog):
    """A context in which the process with this id works for us. It ends with TimeoutError when `seconds` have passed
    and the process has had as much processor time, over all its threads; and with ProcessStalled if it has had none for
    a while although it could have (`processes.is_held_up`): for 3 seconds, or `seconds` if that is less.

    It ignores a process that is gone, which its listener will notice.
    """

    def __init__(self, pid: int, seconds: float, *, still: float = _STILL_SECONDS) -> None:
        super().__init__(max(0.01, min(_LOOK_SECONDS, seconds / 4)))
        self._pid = pid
        self._seconds = seconds
        self._still = min(still, seconds)

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._began = self._moved = self._loop.time()
        self._before = self._seen = cpu_seconds(self._pid) or 0.0
        return self

    def passed_to(self, pid: int) -> None:
        """The work begins now, in another process that was just started for it."""
        self._pid = pid
        self._began = self._moved = self._loop.time()
        self._before = self._seen = 0.0

    @property
    def spent(self) -> float:
        """Seconds that the work has taken so far: processor time or elapsed time, whichever is less. For a process that
        has ended, the processor time last seen."""
        self._seen = max(self._seen, cpu_seconds(self._pid) or 0.0)
        return min(self._loop.time() - self._began, self._seen - self._before)

    def _look(self, late: float) -> Exception | None:
        if late > _LATE_SECONDS:  # this process stood still, and so may have the other: that time counts for nothing
            self._began += late
            self._moved += late
        return self._verdict()

    def _verdict(self) -> Exception | None:
        now, used = self._loop.time(), cpu_seconds(self._pid)
        if used is None:
            return None
        if now - self._began >= self._seconds and used - self._before >= self._seconds:
            return TimeoutError()
        if used > self._seen:
            self._seen, self._moved = used, now
        idle = now - self._moved
        if idle >= self._still and (idle > HELD_UP_SECONDS or not is_held_up(self._pid)):
            return ProcessStalled(stopped=is_stopped(self._pid))
        return None
