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
    """An array, not filled, that begins with a line, and from the size of a large page on with such a page, where Linux
    has any: few rows' products take a third less time where a processor need not look up every 4 KiB.

    Memory that the heap has had before lies in small pages for good, so large arrays do not come from there.
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
