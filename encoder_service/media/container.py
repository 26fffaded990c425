"""Whether a video file is all there, as far as its container says how long it is.

The decoder's library makes do with what it finds: of a download that broke off it shows the frames that came, or a
single grey one, and says nothing. Containers made to be sent as they grow (MPEG-TS, FLV, fragments) do not say how long
they will be; of those, a beginning is a whole file.
"""

from __future__ import annotations

from encoder_service.media.sniff import ebml_size, video_format

_SEGMENT = b"\x18\x53\x80\x67"
_LARGE = 1
"""A box size that stands for a size of eight bytes behind the box's kind."""
_TO_THE_END = 0


def is_whole(data: bytes) -> bool:
    """False where the container holds more bytes than the file has. Takes microseconds."""
    match video_format(data[:512]):
        case "MP4":
            return _mp4_is_whole(data)
        case "MATROSKA":
            return _matroska_is_whole(data)
        case "AVI":
            return 8 + int.from_bytes(data[4:8], "little") <= len(data)
        case _:
            return True


def _mp4_is_whole(data: bytes) -> bool:
    """Boxes are: size (4 bytes, their own head included), kind (4), body. What is no box behind the last is let be."""
    at = 0
    while at + 8 <= len(data):
        size, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if size == _LARGE:
            size = int.from_bytes(data[at + 8 : at + 16], "big")
        if size == _TO_THE_END:
            return True
        if kind == b"mdat" and at + size > len(data):
            return False
        at += max(size, 8)
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
