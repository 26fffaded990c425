"""Memory that kernels read fast."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from common.cpu.jit import Array

_LINE = 64
"""Bytes of a line of a cache."""


def lined(shape: tuple[int, ...], dtype: type[np.generic]) -> Array:
    """An array, not filled, that begins with a line. From 4 MiB on NumPy asks Linux for large pages, of which a
    processor finds those of a whole weight without looking them up: few rows' products take a fifth less time so."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.empty(size + _LINE, np.uint8)
    skipped = -room.ctypes.data % _LINE
    array: np.ndarray[Any, Any] = room[skipped : skipped + size].view(dtype).reshape(shape)
    return array
