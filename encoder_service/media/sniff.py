"""Which format the first bytes belong to. Only these formats are ever given to a decoder.

A video container is named here too, so that the decoder's library does not meet playlists and other formats that point
at files or addresses. The library looks for itself, though, and takes what is likeliest to it: so a container is asked
for more than its magic number, and the decode process, should that not do, can open neither file nor socket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from common.errors import InvalidInput
from common.media.item import Modality

_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")
_EBML_KINDS = (b"matroska", b"webm")

_IMAGES: Final[dict[str, Callable[[bytes], bool]]] = {
    "JPEG": lambda head: head.startswith(b"\xff\xd8\xff"),
    "PNG": lambda head: head.startswith(b"\x89PNG\r\n\x1a\n"),
    "WEBP": lambda head: head.startswith(b"RIFF") and head[8:12] == b"WEBP",
    "GIF": lambda head: head.startswith((b"GIF87a", b"GIF89a")),
    "BMP": lambda head: head.startswith(b"BM"),
}
_VIDEOS: Final[dict[str, Callable[[bytes], bool]]] = {
    "MP4": lambda head: head[4:8] in _BOXES,
    "MATROSKA": lambda head: head.startswith(b"\x1a\x45\xdf\xa3") and any(kind in _ebml(head) for kind in _EBML_KINDS),
    "AVI": lambda head: head.startswith(b"RIFF") and head[8:12] == b"AVI ",
    "FLV": lambda head: head.startswith(b"FLV\x01") and head[5:9] == b"\x00\x00\x00\x09",
    "MPEGTS": lambda head: len(head) > 376 and head[0] == head[188] == head[376] == 0x47,
}
_MIME_TYPES: Final[dict[str, frozenset[str]]] = {
    "JPEG": frozenset({"image/jpeg", "image/jpg", "image/pjpeg"}),
    "PNG": frozenset({"image/png", "image/apng", "image/x-png"}),
    "WEBP": frozenset({"image/webp"}),
    "GIF": frozenset({"image/gif"}),
    "BMP": frozenset({"image/bmp", "image/x-bmp", "image/x-ms-bmp"}),
    "MP4": frozenset({"video/mp4", "video/quicktime", "video/x-m4v", "video/3gpp", "application/mp4"}),
    "MATROSKA": frozenset({"video/webm", "video/x-matroska", "video/matroska"}),
    "AVI": frozenset({"video/x-msvideo", "video/avi", "video/msvideo", "video/vnd.avi"}),
    "FLV": frozenset({"video/x-flv"}),
    "MPEGTS": frozenset({"video/mp2t"}),
}


def image_format(head: bytes) -> str | None:
    """The name of a picture's format, or None."""
    return next((name for name, fits in _IMAGES.items() if fits(head)), None)


def video_format(head: bytes) -> str | None:
    """The name of a video's container, or None."""
    return next((name for name, fits in _VIDEOS.items() if fits(head)), None)


def ebml_size(data: bytes, at: int) -> tuple[int, int]:
    """Where a size of variable length in Matroska ends, and its value: as many bytes as there are leading zeros in the
    first, and one; the bit that ends these zeros does not count.

    >>> ebml_size(bytes([0x40, 0x02]), 0)
    (2, 2)
    """
    length = 9 - int.from_bytes(data[at : at + 1], "big").bit_length()
    value = int.from_bytes(data[at : at + length], "big")
    return at + length, value & ((1 << 7 * length) - 1)


def _ebml(head: bytes) -> bytes:
    """The body of the first element, which says what kind of document follows."""
    begin, size = ebml_size(head, 4)
    return head[begin : begin + size]


def check(data: bytes | bytearray, modality: Modality, mime_type: str, field: str) -> None:
    """Raises InvalidInput unless the bytes begin as a format of the modality does, and as the MIME type says."""
    head = bytes(data[:512])
    name = image_format(head) if modality is Modality.IMAGE else video_format(head)
    if name is None:
        raise InvalidInput(f"the bytes are not a supported {modality}", reason="MEDIA_FORMAT", field=field)
    stated = mime_type.partition(";")[0].strip().lower()
    if stated and stated not in _MIME_TYPES[name]:
        raise InvalidInput("the MIME type does not match the bytes", reason="MIME_MISMATCH", field=f"{field}.mime_type")
