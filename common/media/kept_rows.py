"""Which rows of a pruned video are kept, as transferred and stored: a bit for each row of its grid, in order, from a
byte's lowest bit on; the rest of the last byte is zero."""

from __future__ import annotations

import numpy as np


def pack(kept: np.ndarray) -> bytes:
    """The bits of a mask [rows] of bool.

    >>> pack(np.array([True, False, True])).hex()
    '05'
    """
    return np.packbits(kept, bitorder="little").tobytes()


def unpack(bits: bytes, rows: int) -> np.ndarray:
    """The mask [rows] of bool that `pack` was given."""
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=rows, bitorder="little").astype(np.bool_)


def count(bits: bytes) -> int:
    """How many rows are kept."""
    return int.from_bytes(bits, "little").bit_count()


def fits(bits: bytes, rows: int) -> bool:
    """Whether these are the bits of so many rows, one of which at least is kept.

    >>> fits(b"\\x05", 3), fits(b"\\x09", 3), fits(b"\\x00", 3)
    (True, False, False)
    """
    return len(bits) == -(-rows // 8) and 0 < int.from_bytes(bits, "little").bit_length() <= rows
