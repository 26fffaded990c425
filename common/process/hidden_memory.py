"""Memory of a process that no other process of the same user can read."""

from __future__ import annotations

import ctypes

_PR_SET_DUMPABLE = 4


def hide_memory() -> None:
    """From now on other processes of the same user cannot read this one's memory and environment or trace it, and it
    leaves no core dump. Programs that it starts are not affected."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0)
