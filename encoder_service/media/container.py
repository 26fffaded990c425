"""Checks a video file before its decoder sees it: that it does not have too many parts, and that it is complete, as far
as its container states lengths. Only heads are read."""

from __future__ import annotations

from binascii import unhexlify
from collections.abc import Iterator
from typing import Final

from encoder_service.media import mp4
from encoder_service.media.complexity import PartCount
from encoder_service.media.sniff import VIDEOS, ebml_size, format_of

_SEGMENT: Final = b"\x18\x53\x80\x67"
_NESTS: Final = frozenset(
    unhexlify(each)
    for each in (
        b"18538067 114d9b74 4dbb 1549a966 1654ae6b ae e0 e1 6d80 6240 1f43b675 a0 75a1 a6 "
        b"1c53bb6b bb b7 1941a469 61a7 1043a770 45b9 b6 80 1254c367 7373 63c0 67c8"
    ).split()
)
"""Elements that contain elements: segment, seek heads, information, tracks, clusters and block groups, cues,
attachments, chapters, tags, and their children."""
_BLOCKS: Final = (b"\xa3", b"\xa1")
_LACED = 0x06
"""Flags of a block that holds several frames."""

_LISTS: Final = (b"RIFF", b"LIST")


def check_parts(data: bytes, max_parts: int) -> None:
    """Raises TooComplex for more boxes, elements, chunks or tags than `max_parts`; packets of MPEG-TS are counted when
    they are read (`transport_stream`)."""
    match format_of(data[:512], VIDEOS):
        case "MP4":
            mp4.count(data, max_parts)
        case "MATROSKA":
            _count_matroska(data, max_parts)
        case "AVI":
            _count_avi(data, max_parts)
        case "FLV":
            _count_flv(data, max_parts)


def is_whole(data: bytes) -> bool:
    """False if the container states more bytes than the file has: of an interrupted download, the decoder's library
    would silently show the frames that arrived, or a grey one."""
    match format_of(data[:512], VIDEOS):
        case "MP4":
            return mp4.is_whole(data)
        case "MATROSKA":
            return _matroska_is_whole(data)
        case "AVI":
            return _avi_is_whole(data)
        case _:  # made to be sent as it grows (MPEG-TS, FLV): a beginning is a whole file
            return True


def _avi_is_whole(data: bytes) -> bool:
    """A long file is several lists in a row. Anything behind the last list is ignored."""
    at = 0
    while data[at : at + 4] == b"RIFF":
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        if at + 8 + size > len(data):
            return False
        at += 8 + size + size % 2
    return True


def _matroska_is_whole(data: bytes) -> bool:
    """Elements are: identifier, size, body. The first is a short header, the second, the segment, all the rest."""
    at, header = ebml_size(data, 4)
    start = at + header
    if data[start : start + 4] != _SEGMENT:
        return True
    begin, size = ebml_size(data, start + 4)
    unknown = (1 << 7 * (begin - start - 4)) - 1
    return size == unknown or begin + size <= len(data)


def _count_matroska(data: bytes, max_parts: int) -> None:
    """Counts elements, and frames of laced blocks. A byte where no element begins counts as one."""
    parts = PartCount(max_parts)
    for kind, begin, end in _elements(data):
        parts.add()
        if kind in _BLOCKS:
            flags, _ = ebml_size(data, begin)  # after the track's number and two bytes of time
            if flags + 3 < end and data[flags + 2] & _LACED:
                parts.add(data[flags + 3])


def _elements(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """The kind of every element, and where its body begins and ends; children follow their parent."""
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


def _count_avi(data: bytes, max_parts: int) -> None:
    """Chunks are: kind (4 bytes), size (4), body, to an even length."""
    parts, at = PartCount(max_parts), 0
    while at + 8 <= len(data):
        parts.add()
        if data[at : at + 4] in _LISTS:
            at += 12
        else:
            size = int.from_bytes(data[at + 4 : at + 8], "little")
            at += 8 + size + size % 2


def _count_flv(data: bytes, max_parts: int) -> None:
    """Tags are: kind (1 byte), size (3), 7 others, body, back link (4)."""
    parts, at = PartCount(max_parts), 13
    while at + 11 <= len(data):
        parts.add()
        at += 15 + int.from_bytes(data[at + 1 : at + 4], "big")
