"""Memory of a process that no other process of the same user can read."""

from __future__ import annotations

import ctypes

_PR_SET_DUMPABLE = 4


def hide_memory() -> None:
    """From now on other processes of the same user can neither read this one's memory and environment nor trace it, and
    it leaves no core dump. A program that it starts can be seen as any other."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0)
