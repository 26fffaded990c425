"""Compiles kernels in processes beside the one that computes, in which torch computes meanwhile."""

from __future__ import annotations

import enum
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from common.hardware import usable_cores
from common.telemetry import log

_log = log.get("kernels")
_MOST = 4
"""Processes: with more, each would wait for the longest of a few dear kernels."""
_TOLD = 500
"""Characters of a compiler's output that are logged."""


class Readiness(enum.IntEnum):
    """How far a rank's kernels are, the worst first: of a group's ranks, the least one counts."""

    FAILED = 0
    WAITING = 1
    THERE = 2


class Compilation:
    """Compiles kernels of these names in another process, or in several if there are enough cores, and loads them into
    this one when all are done.

    The processes end with the thread that starts them.
    """

    def __init__(self, names: Sequence[str], count: int | None = None) -> None:
        self.readiness = Readiness.WAITING
        self._names = names
        self._begun = time.monotonic()
        self._processes = [_start(names) for _ in range(count or _processes_for(len(names), usable_cores()))]
        threading.Thread(target=self._wait, name="kernels", daemon=True).start()

    def _wait(self) -> None:
        told = [process.communicate()[1].strip() for process in self._processes]
        failed = [
            said.rpartition("\n")[2][:_TOLD] or f"exit code {process.returncode}"
            for said, process in zip(told, self._processes, strict=True)
            if process.returncode
        ]
        if failed:
            _log.warning("our kernels cannot be compiled", cause=failed[0])
            self.readiness = Readiness.FAILED
        elif missing := not_kept(self._names):
            _log.warning("our kernels cannot be compiled", cause=f"not kept: {', '.join(missing)}")
            self.readiness = Readiness.FAILED
        else:
            _log.info("our kernels are compiled", seconds=round(time.monotonic() - self._begun, 1))
            self.readiness = Readiness.THERE


def _start(names: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "common.cpu.compile", *names],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "TWINLENS_PARENT": str(os.getpid())},
    )


def _processes_for(kernels: int, cores: int) -> int:
    """How many compile so many kernels: a quarter of the cores, since torch computes on all of them meanwhile.

    >>> _processes_for(14, 2), _processes_for(14, 16), _processes_for(2, 16), _processes_for(14, 96)
    (1, 4, 2, 4)
    """
    return max(1, min(kernels, cores // 4, _MOST))


def not_kept(names: Sequence[str]) -> list[str]:
    """Loads kernels into this process and returns the names of those that are not on disk."""
    from common.cpu.jit import find  # numba takes its time

    return [name for name in names if not find(name).load()]
