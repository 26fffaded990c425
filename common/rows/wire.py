"""Rows on the wire: element types, checksums, and how a block is cut into chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import google_crc32c
import numpy as np

CHUNK_BYTES = 1 << 20
"""Rows travel in chunks of about this size: large enough to amortise a message, small enough for flow control."""


class DType(StrEnum):
    """An element type, by the name that torch and safetensors users know."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self is DType.FLOAT32 else 2


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The layout of one row: `levels` (1 + deepstack levels) times `width` elements of `dtype`."""

    levels: int
    width: int
    dtype: DType

    @property
    def row_bytes(self) -> int:
        """Bytes of one row with all its levels."""
        return self.levels * self.width * self.dtype.itemsize

    def chunks(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Cuts rows [first, end) into (first row, row count) runs of at most CHUNK_BYTES, at least one row each."""
        step = max(1, CHUNK_BYTES // self.row_bytes)
        for start in range(first, end, step):
            yield start, min(step, end - start)


def crc32c(data: bytes | memoryview) -> int:
    """CRC-32C (Castagnoli, RFC 3720) of `data`, without copying it."""
    # transformers refuses a memoryview, and reads an array of numpy's in place.
    value: int = google_crc32c.value(np.asarray(data) if isinstance(data, memoryview) else data)
    return value


_NOT_FINITE = {
    DType.FLOAT32: (0x7F800000, "i4", "u4"),
    DType.BFLOAT16: (0x7F80, "i2", "u2"),
    DType.FLOAT16: (0x7C00, "i2", "u2"),
}


def all_finite(data: bytes | memoryview, dtype: DType) -> bool:
    """Whether no element of `data` is infinite or NaN.

    As integers, these are the largest: positive ones as signed, negative ones as unsigned. So two maxima suffice, at
    memory speed and without a copy.
    """
    if not len(data):
        return True
    exponent, signed, unsigned = _NOT_FINITE[dtype]
    sign = 1 << (dtype.itemsize * 8 - 1)
    numbers = np.frombuffer(data, dtype=f"<{signed}")
    return bool(numbers.max() < exponent and numbers.view(f"<{unsigned}").max() < sign | exponent)
