"""How our numba kernels are compiled: for this processor, on all threads, and once for all processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., None]) -> Any:
    """Compiled at its first call, and kept on disk where a folder for that can be written."""
    try:
        return numba.njit(parallel=True, fastmath=True, nogil=True, cache=True)(function)
    except RuntimeError:  # no folder to keep it in
        return numba.njit(parallel=True, fastmath=True, nogil=True)(function)


def use_threads(count: int) -> None:
    """How many threads the kernels take at most, in the thread that calls this."""
    numba.set_num_threads(min(count, numba.get_num_threads()))
