"""Kernels that Triton compiles, or reads from its folder, once a process serves: a request waits for each of them."""

from __future__ import annotations

from typing import Any

from common.telemetry import log

_log = log.get("kernels")


class LateCompiles:
    """Counts them from `watch` on, and has each logged: it is one that the warm-up should have met."""

    def __init__(self) -> None:
        self.count = 0

    def watch(self) -> None:
        """Begins to count: everything compiled so far belongs to the start."""
        from triton import knobs  # missing if nothing is computed on a GPU

        knobs.runtime.jit_post_compile_hook = self._compiled

    def take(self) -> int:
        """The number since the last call; resets it."""
        taken, self.count = self.count, 0
        return taken

    def _compiled(self, *, repr: str, **_: Any) -> None:  # noqa: A002 - Triton calls it by this name
        self.count += 1
        _log.warning("a kernel is compiled while requests are served", kernel=repr)
