"""How many parts videos other than MP4 are made of: elements of Matroska, chunks of AVI, tags of FLV. Only heads are
read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from encoder_service.media.bounds import Count
from encoder_service.media.sniff import ebml_size

_NESTS: Final = frozenset(
    map(
        bytes.fromhex,
        [
            "18538067",
            "114d9b74",
            "4dbb",
            "1549a966",
            "1654ae6b",
            "ae",
            "e0",
            "e1",
            "6d80",
            "6240",
            "1f43b675",
            "a0",
            "75a1",
            "a6",
            "1c53bb6b",
            "bb",
            "b7",
            "1941a469",
            "61a7",
            "1043a770",
            "45b9",
            "b6",
            "80",
            "1254c367",
            "7373",
            "63c0",
            "67c8",
        ],
    )
)
"""Elements whose bodies are elements: segment, seek heads, information, tracks, clusters and block groups, cues,
attachments, chapters, tags, and what these hold."""
_BLOCKS: Final = (b"\xa3", b"\xa1")
_LACED = 0x06
"""Flags of a block that holds several frames."""

_LISTS: Final = (b"RIFF", b"LIST")


def count_matroska(data: bytes, most: int) -> None:
    """Raises TooComplex for more elements and frames than `most`. Where no element begins, a byte counts as one."""
    parts = Count(most)
    for kind, begin, end in _elements(data):
        parts.add()
        if kind in _BLOCKS:
            flags, _ = ebml_size(data, begin)  # behind the track's number, and two bytes of time
            if flags + 3 < end and data[flags + 2] & _LACED:
                parts.add(data[flags + 3])


def _elements(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """The kind of every element, and where its body begins and ends; those inside of another follow it."""
    ends, at = [len(data)], 0
    while ends:
        if at + 2 > ends[-1]:
            at = ends.pop()
            continue
        length = 9 - data[at].bit_length()
        if length > 4:
            yield b"", at, at
            at += 1
            continue
        kind = data[at : at + length]
        begin, size = ebml_size(data, at + length)
        unknown = (1 << 7 * (begin - at - length)) - 1
        end = ends[-1] if size == unknown else min(begin + size, ends[-1])
        yield kind, begin, end
        if kind in _NESTS and begin <= end:
            ends.append(end)
            at = begin
        else:
            at = max(end, begin)


def count_avi(data: bytes, most: int) -> None:
    """Raises TooComplex for more chunks than `most`. They are: kind (4 bytes), size (4), body, to an even length."""
    parts, at = Count(most), 0
    while at + 8 <= len(data):
        parts.add()
        if data[at : at + 4] in _LISTS:
            at += 12
        else:
            size = int.from_bytes(data[at + 4 : at + 8], "little")
            at += 8 + size + size % 2


def count_flv(data: bytes, most: int) -> None:
    """Raises TooComplex for more tags than `most`. They are: kind (1 byte), size (3), 7 others, body, back link (4)."""
    parts, at = Count(most), 13
    while at + 11 <= len(data):
        parts.add()
        at += 15 + int.from_bytes(data[at + 1 : at + 4], "big")
