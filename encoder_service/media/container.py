"""What is known of a video file before its decoder sees it: that it is not made of too many parts, and that it is all
there, as far as its container says how long it is.

The decoder's library makes do with what it finds: of a download that broke off it shows the frames that came, or a
single grey one, and says nothing. Containers made to be sent as they grow (MPEG-TS, FLV, fragments) do not say how long
they will be; of those, a beginning is a whole file.
"""

from __future__ import annotations

from encoder_service.media import elements, mp4
from encoder_service.media.sniff import ebml_size, video_format

_SEGMENT = b"\x18\x53\x80\x67"


def check_parts(data: bytes, most: int) -> None:
    """Raises TooComplex for more boxes, elements, chunks or tags than `most`; packets of MPEG-TS are counted when they
    are read (`transport_stream`)."""
    match video_format(data[:512]):
        case "MP4":
            mp4.count(data, most)
        case "MATROSKA":
            elements.count_matroska(data, most)
        case "AVI":
            elements.count_avi(data, most)
        case "FLV":
            elements.count_flv(data, most)


def is_whole(data: bytes) -> bool:
    """False where the container holds more bytes than the file has."""
    match video_format(data[:512]):
        case "MP4":
            return mp4.is_whole(data)
        case "MATROSKA":
            return _matroska_is_whole(data)
        case "AVI":
            return _avi_is_whole(data)
        case _:
            return True


def _avi_is_whole(data: bytes) -> bool:
    """A long file is several lists in a row. What is no list behind the last is let be."""
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
