"""The format of an item in the shared store: a self-describing header, and chunks of rows with checksums.

Everything read back is checked against its checksum, its key, and the layout of the served model; anything that does
not fit raises `Garbage`. Checksums detect damage, not forgery: writers are trusted.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

import google_crc32c
import msgspec

from common.media import kept_rows
from common.media.item import Grid, Header, Modality, PromptPart
from common.rows.wire import RowLayout

MAGIC = b"TLR2"
_CRC = struct.Struct("<I")


class Garbage(Exception):
    """The content under a key is not what we would have written."""


class _Stored(msgspec.Struct, array_like=True):
    """The header's body: the item and the layout of its rows."""

    key: bytes
    owner: bytes
    modality: Modality
    grid: tuple[int, int, int]
    tokens: int
    timestamps: tuple[float, ...]
    seconds_per_grid: float
    levels: int
    width: int
    dtype: str
    grid_rows: int
    kept_rows: bytes
    replacement: tuple[PromptPart, ...] = ()


def pack_header(header: Header, salt: str, layout: RowLayout) -> bytes:
    """The header's bytes: magic, body, CRC-32C of both."""
    stored = _Stored(
        key=header.key,
        owner=owner(header.key, salt),
        modality=header.modality,
        grid=(header.grid.t, header.grid.h, header.grid.w),
        tokens=header.tokens,
        timestamps=header.timestamps,
        seconds_per_grid=header.seconds_per_grid,
        levels=layout.levels,
        width=layout.width,
        dtype=layout.dtype.value,
        grid_rows=header.grid_rows,
        kept_rows=header.kept_rows,
        replacement=header.replacement,
    )
    body = MAGIC + msgspec.msgpack.encode(stored)
    return body + _CRC.pack(google_crc32c.value(body))


def read_header(data: bytes, key: bytes, salt: str, layout: RowLayout) -> Header | None:
    """The header of a key; None if it belongs to another tenant. Raises Garbage."""
    body, crc = data[: -_CRC.size], data[-_CRC.size :]
    if not body.startswith(MAGIC) or crc != _CRC.pack(google_crc32c.value(body)):
        raise Garbage("a header is damaged")
    try:
        stored = msgspec.msgpack.decode(body[len(MAGIC) :], type=_Stored)
    except msgspec.MsgspecError as error:
        raise Garbage("a header cannot be read") from error
    if stored.key != key or (stored.levels, stored.width, stored.dtype) != (layout.levels, layout.width, layout.dtype):
        raise Garbage("a header is another item's, or another model's")
    if min(*stored.grid, stored.tokens) < 1:
        raise Garbage("a header is invalid")
    if stored.grid_rows and not kept_rows.fits(stored.kept_rows, stored.grid_rows):
        raise Garbage("a header's kept_rows do not match its row count")
    if not hmac.compare_digest(stored.owner, owner(key, salt)):
        return None
    return Header(
        key,
        stored.modality,
        Grid(*stored.grid),
        stored.tokens,
        stored.timestamps,
        stored.seconds_per_grid,
        grid_rows=stored.grid_rows,
        kept_rows=stored.kept_rows,
        replacement=stored.replacement,
    )


def owner(key: bytes, salt: str) -> bytes:
    """Proves that a caller knows the salt under which a key was made, and reveals nothing else."""
    return hmac.digest(salt.encode(), key, hashlib.sha256)


def pack_chunk(key: bytes, number: int, rows: memoryview) -> bytes:
    """Rows behind a CRC-32C that also covers their place."""
    data = bytes(rows)
    return _CRC.pack(_checksum(key, number, data)) + data


def read_chunk(data: bytes, key: bytes, number: int, into: memoryview) -> None:
    """Copies a chunk's rows to their place; raises Garbage if they are damaged."""
    if len(data) != _CRC.size + len(into):
        raise Garbage("a chunk has another size")
    rows = data[_CRC.size :]
    if data[: _CRC.size] != _CRC.pack(_checksum(key, number, rows)):
        raise Garbage("a chunk is damaged")
    into[:] = rows


def _checksum(key: bytes, number: int, rows: bytes) -> int:
    start: int = google_crc32c.value(key + number.to_bytes(4, "little"))
    value: int = google_crc32c.extend(start, rows)
    return value
