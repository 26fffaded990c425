"""A run of rows as it travels inline: an `EncodeResponse` that is written and read with as few copies as Python allows.
protobuf's own methods copy a message with a megabyte in it four times on the way out and three on the way in; here the
same bytes are copied once into the message that gRPC is given, and once out of the one that it gives."""

from __future__ import annotations

from dataclasses import dataclass

from common.rows.wire import crc32c

_ROWS = 0x12  # EncodeResponse.rows: field 2, length-delimited
_ITEM, _FIRST, _COUNT, _DATA, _CRC = 0x08, 0x10, 0x18, 0x22, 0x35  # fields 1–4 and 6 of EncodeRows


@dataclass(frozen=True, slots=True)
class RowsFrame:
    """Rows [first, first + count) of an item, row-major, and the CRC-32C that was sent with them.

    `data` may be a view of the message that it came in.
    """

    item: int
    first: int
    count: int
    data: bytes | memoryview
    crc: int


def pack(item: int, first: int, count: int, data: memoryview) -> bytes:
    """The serialized `EncodeResponse` of a run of rows.

    >>> unpack(pack(0, 300, 1, memoryview(b"row"))).first
    300
    """
    fields = b"".join(
        bytes((tag,)) + varint(value) for tag, value in ((_ITEM, item), (_FIRST, first), (_COUNT, count)) if value
    )
    fields += bytes((_CRC,)) + crc32c(data).to_bytes(4, "little") + bytes((_DATA,)) + varint(len(data))
    return b"".join((bytes((_ROWS,)), varint(len(fields) + len(data)), fields, data))


def unpack(message: bytes) -> RowsFrame | None:
    """The run of rows in a serialized `EncodeResponse`; None for anything else, which protobuf parses."""
    try:
        return _unpack(message)
    except IndexError:
        return None


def _unpack(message: bytes) -> RowsFrame | None:
    if message[0] != _ROWS:
        return None
    size, at = _read_varint(message, 1)
    if at + size != len(message):
        return None
    found = dict.fromkeys((_ITEM, _FIRST, _COUNT, _CRC), 0)
    data: memoryview | None = None
    while at < len(message):
        tag = message[at]
        if tag == _CRC:
            found[tag], at = int.from_bytes(message[at + 1 : at + 5], "little"), at + 5
        elif tag == _DATA:
            size, at = _read_varint(message, at + 1)
            data, at = memoryview(message)[at : at + size], at + size
        elif tag in found:
            found[tag], at = _read_varint(message, at + 1)
        else:
            return None
    if at != len(message) or data is None:
        return None
    return RowsFrame(found[_ITEM], found[_FIRST], found[_COUNT], data, found[_CRC])


def varint(value: int) -> bytes:
    """A non-negative number, seven bits a byte, the lowest first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """(number, where it ends); a number of more than 32 bits stops the parsing: no field here is that large."""
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 28:
            raise IndexError("a number is too long")
