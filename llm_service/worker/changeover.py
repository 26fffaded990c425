"""From torch's kernels to ours: while a process of its own compiles ours, torch computes; where they are on disk,
nothing of this happens. All ranks change over together, between two steps. Rank 0 asks when its own kernels are there,
no more than once a second; where one rank lacks its own, nothing changes."""

from __future__ import annotations

import enum
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from common import log
from llm_service.layers.cpu import selection

_log = log.get("kernels")
_PAUSE_SECONDS = 1.0
_TOLD = 500
"""Characters of what a compiler says that go to the log."""


class Readiness(enum.IntEnum):
    """How far a rank's kernels are, the worst first: of a group's ranks, the least one counts."""

    FAILED = 0
    WAITING = 1
    THERE = 2


class Compiling(Protocol):
    """Whatever makes a rank's kernels."""

    @property
    def readiness(self) -> Readiness:
        """How far they are."""
        ...


class There:
    """Kernels that are."""

    readiness = Readiness.THERE


class CompilingProcess:
    """Compiles kernels of these names in another process, and loads them into this one when it is through.

    It is started by the calling thread, with which it ends.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.readiness = Readiness.WAITING
        self._names = names
        self._begun = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "llm_service.layers.cpu.compile", *names],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "TWINLENS_PARENT": str(os.getpid())},
        )
        threading.Thread(target=self._wait, name="kernels", daemon=True).start()

    def _wait(self) -> None:
        said = self._process.communicate()[1].strip()
        if self._process.returncode:
            cause = said.rpartition("\n")[2][:_TOLD] or f"exit code {self._process.returncode}"
            _log.warning("our kernels cannot be compiled", cause=cause)
            self.readiness = Readiness.FAILED
        elif missing := not_kept(self._names):
            _log.warning("our kernels cannot be compiled", cause=f"not kept: {', '.join(missing)}")
            self.readiness = Readiness.FAILED
        else:
            _log.info("our kernels are compiled", seconds=round(time.monotonic() - self._begun, 1))
            self.readiness = Readiness.THERE


def not_kept(names: Sequence[str]) -> list[str]:
    """Loads kernels into this process; which of them are not on disk."""
    from llm_service.layers.cpu.jit import find  # numba takes its time

    return [name for name in names if not find(name).load()]


class Changeover:
    """One rank's, from when torch has begun to compute."""

    def __init__(self, compiling: Compiling, clock: Callable[[], float] = time.monotonic) -> None:
        self._compiling = compiling
        self._clock = clock
        self._begun = clock()
        self._next = 0.0
        self.over = False

    @property
    def waits(self) -> bool:
        """Whether this rank's kernels are still being compiled; for any thread."""
        return self._compiling.readiness is Readiness.WAITING

    @property
    def due(self) -> bool:
        """Whether it is worth while to ask all ranks."""
        return not (self.over or self.waits) and self._clock() >= self._next

    def ask(self, all_reduce_min: Callable[[int], int]) -> None:
        """Every rank, between the same two steps: has our kernels compute from now on, if all ranks have them.
        `all_reduce_min` is `TensorGroup.all_reduce_min`."""
        found = Readiness(all_reduce_min(self._compiling.readiness))
        self._next = self._clock() + _PAUSE_SECONDS
        self.over = found is not Readiness.WAITING
        if found is Readiness.THERE:
            selection.select(numba=True)
            _log.info("our kernels compute from now on", seconds=round(self._clock() - self._begun, 1))
        elif found is Readiness.FAILED:
            _log.warning("torch goes on computing, more slowly, since a rank lacks our kernels")
