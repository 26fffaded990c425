"""Arrays that begin with a line of the cache: a vector or a row of a tile that lies over two lines takes twice as
long."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from common.cpu.jit import Array, inner
from common.cpu.vectors.llvm import FLOAT, LANES, LINE


def lined_up(shape: tuple[int, ...], dtype: type[np.generic]) -> Array:
    """An empty array of numbers of four bytes."""
    room, size = np.empty(math.prod(shape) + LANES, dtype), math.prod(shape)
    first = -room.ctypes.data % LINE // FLOAT
    return room[first : first + size].reshape(shape)


@inner
def zeros_lined_up(rows: Any, width: Any) -> Any:
    """float32 [rows, width], inside of a kernel."""
    room = np.zeros(rows * width + LANES, np.float32)
    first = -room.ctypes.data % LINE // FLOAT
    return room[first : first + rows * width].reshape(rows, width)
