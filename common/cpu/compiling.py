"""Compiling kernels in a process beside the one that computes, which has torch compute meanwhile."""

from __future__ import annotations

import enum
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from common import log

_log = log.get("kernels")
_TOLD = 500
"""Characters of what a compiler says that go to the log."""


class Readiness(enum.IntEnum):
    """How far a rank's kernels are, the worst first: of a group's ranks, the least one counts."""

    FAILED = 0
    WAITING = 1
    THERE = 2


class CompilingProcess:
    """Compiles kernels of these names in another process, and loads them into this one when it is through.

    It is started by the calling thread, with which it ends.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.readiness = Readiness.WAITING
        self._names = names
        self._begun = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "common.cpu.compile", *names],
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
    from common.cpu.jit import find  # numba takes its time

    return [name for name in names if not find(name).load()]
