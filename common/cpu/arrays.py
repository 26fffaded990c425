"""Memory that kernels read fast."""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import Any

import numpy as np

from common.cpu.jit import Array

_LINE = 64
"""Bytes of a line of a cache."""
_LARGE_PAGE = 1 << 21


def lined(shape: tuple[int, ...], dtype: type[np.generic]) -> Array:
    """An uninitialised array that begins at a cache line, or, if it is as large as a huge page, at one of these, where
    Linux has any: few rows' products take a third less time if the processor need not look up every 4 KiB.

    Memory that the heap has used before stays in small pages, so large arrays are not taken from there.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    boundary, room = _LINE, np.empty(0, np.uint8)
    if size >= _LARGE_PAGE:
        boundary = _LARGE_PAGE
        pages = mmap.mmap(-1, size + boundary, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
        room = np.frombuffer(pages, np.uint8)
    else:
        room = np.empty(size + boundary, np.uint8)
    skipped = -room.ctypes.data % boundary
    array: np.ndarray[Any, Any] = room[skipped : skipped + size].view(dtype).reshape(shape)
    return array
