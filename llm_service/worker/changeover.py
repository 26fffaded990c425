"""Switches from torch's kernels to ours: torch computes while a separate process compiles ours; if they are cached on
disk, this is not needed. All ranks switch together, between two steps. Rank 0 asks when its own kernels are ready, at
most once a second; nothing changes while one rank lacks its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from common.cpu.compiling import Readiness
from common.telemetry import log
from llm_service.layers.cpu import selection

_log = log.get("kernels")
_PAUSE_SECONDS = 1.0


class Compiling(Protocol):
    """Compiles a rank's kernels."""

    @property
    def readiness(self) -> Readiness:
        """How far they are."""
        ...


class Changeover:
    """One rank's, from when torch has begun to compute; `compiling` is None if the rank has its kernels."""

    def __init__(self, compiling: Compiling | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._compiling = compiling
        self._clock = clock
        self._begun = clock()
        self._next = 0.0
        self.over = False

    @property
    def waits(self) -> bool:
        """Whether this rank's kernels are still being compiled; for any thread."""
        return self._readiness is Readiness.WAITING

    @property
    def _readiness(self) -> Readiness:
        return Readiness.THERE if self._compiling is None else self._compiling.readiness

    @property
    def due(self) -> bool:
        """Whether it is worth while to ask all ranks."""
        return not (self.over or self.waits) and self._clock() >= self._next

    def ask(self, all_reduce_min: Callable[[int], int]) -> None:
        """Every rank, between the same two steps: has our kernels compute from now on, if all ranks have them.
        `all_reduce_min` is `TensorGroup.all_reduce_min`."""
        found = Readiness(all_reduce_min(self._readiness))
        self._next = self._clock() + _PAUSE_SECONDS
        self.over = found is not Readiness.WAITING
        if found is Readiness.THERE:
            selection.select(numba=True)
            _log.info("our kernels are in use from now on", seconds=round(self._clock() - self._begun, 1))
        elif found is Readiness.FAILED:
            _log.warning("torch continues to compute, more slowly, since a rank lacks our kernels")
