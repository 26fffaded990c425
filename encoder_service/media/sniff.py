"""The format shown by a file's first bytes. Only these formats are given to a decoder: no playlists, or other formats
that refer to files or addresses. The video library probes by itself and takes the likeliest format, so more than a
container's magic number is checked; and the decode process can open neither files nor sockets."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from common.errors import InvalidInput
from common.media.item import Encoded

_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")
_MP3_LAYERS = (b"\xfb", b"\xfa", b"\xf3", b"\xf2", b"\xe3", b"\xe2")
"""The second byte of a frame: MPEG 1, 2 and 2.5, layer 3, with a checksum or without."""
_EBML_KINDS = (b"matroska", b"webm")


@dataclass(frozen=True, slots=True)
class Format:
    """One format: whether a file's first bytes fit it, and the MIME types that it goes by."""

    fits: Callable[[bytes], bool]
    mime_types: frozenset[str]


def _brands(head: bytes) -> list[bytes]:
    """The brands of a file of boxes: major, then compatible."""
    box = head[8 : int.from_bytes(head[:4], "big")]
    return [box[at : at + 4] for at in (0, *range(8, len(box), 4))]


def _format(fits: Callable[[bytes], bool], *mime_types: str) -> Format:
    return Format(fits, frozenset(mime_types))


def _with(known: Format, *mime_types: str) -> Format:
    return Format(known.fits, known.mime_types | frozenset(mime_types))


IMAGES: Final[dict[str, Format]] = {
    "JPEG": _format(lambda head: head.startswith(b"\xff\xd8\xff"), "image/jpeg", "image/jpg", "image/pjpeg"),
    "PNG": _format(lambda head: head.startswith(b"\x89PNG\r\n\x1a\n"), "image/png", "image/apng", "image/x-png"),
    "WEBP": _format(lambda head: head.startswith(b"RIFF") and head[8:12] == b"WEBP", "image/webp"),
    "GIF": _format(lambda head: head.startswith((b"GIF87a", b"GIF89a")), "image/gif"),
    "BMP": _format(lambda head: head.startswith(b"BM"), "image/bmp", "image/x-bmp", "image/x-ms-bmp"),
    "AVIF": _format(
        lambda head: head[4:8] == b"ftyp" and any(kind in _brands(head) for kind in (b"avif", b"avis")), "image/avif"
    ),
    "TIFF": _format(lambda head: head.startswith((b"II*\x00", b"MM\x00*")), "image/tiff", "image/tif", "image/x-tiff"),
}
if find_spec("pillow_heif") is not None:
    IMAGES["HEIF"] = _format(
        lambda head: head[4:8] == b"ftyp" and any(kind in _brands(head) for kind in (b"heic", b"heix")),
        "image/heic",
        "image/heif",
    )
VIDEOS: Final[dict[str, Format]] = {
    "MP4": _format(
        lambda head: head[4:8] in _BOXES,
        "video/mp4",
        "video/quicktime",
        "video/x-m4v",
        "video/3gpp",
        "application/mp4",
    ),
    "MATROSKA": _format(
        lambda head: head.startswith(b"\x1a\x45\xdf\xa3") and any(kind in _ebml(head) for kind in _EBML_KINDS),
        "video/webm",
        "video/x-matroska",
        "video/matroska",
    ),
    "AVI": _format(
        lambda head: head.startswith(b"RIFF") and head[8:12] == b"AVI ",
        "video/x-msvideo",
        "video/avi",
        "video/msvideo",
        "video/vnd.avi",
    ),
    "FLV": _format(lambda head: head.startswith(b"FLV\x01") and head[5:9] == b"\x00\x00\x00\x09", "video/x-flv"),
    "FRAMES": _format(
        lambda head: any(IMAGES[name].fits(head) for name in ("JPEG", "PNG", "WEBP")),
        "video/jpeg",
        "video/x-motion-jpeg",
        "video/mjpeg",
    ),
    "MPEGTS": _format(lambda head: len(head) > 376 and head[0] == head[188] == head[376] == 0x47, "video/mp2t"),
}


AUDIOS: Final[dict[str, Format]] = {
    "WAV": _format(
        lambda head: head.startswith(b"RIFF") and head[8:12] == b"WAVE",
        "audio/wav",
        "audio/x-wav",
        "audio/wave",
        "audio/vnd.wave",
    ),
    "MP3": _format(
        lambda head: head.startswith(b"ID3") or (head[:1] == b"\xff" and head[1:2] in _MP3_LAYERS),
        "audio/mpeg",
        "audio/mp3",
        "audio/x-mp3",
        "audio/mpeg3",
    ),
    "FLAC": _format(lambda head: head.startswith(b"fLaC"), "audio/flac", "audio/x-flac"),
    "OGG": _format(lambda head: head.startswith(b"OggS"), "audio/ogg", "application/ogg", "audio/opus", "audio/vorbis"),
    "MP4": _with(VIDEOS["MP4"], "audio/mp4", "audio/m4a", "audio/x-m4a"),
    "MATROSKA": _with(VIDEOS["MATROSKA"], "audio/webm", "audio/x-matroska"),
}
"""Files of sound, and videos with a track of their own."""


_TITLES = {
    "WEBP": "WebP",
    "OGG": "Ogg",
    "MATROSKA": "Matroska/WebM",
    "MPEGTS": "MPEG-TS",
    "FRAMES": "pictures as frames",
}
"""Names of formats, if they differ from their keys."""
_NOUNS = {"image": "an image", "video": "a video"}
"""Modalities, with their article if they have one."""
_REFUSED: Final = tuple(
    (name, re.compile(begin, re.DOTALL))
    for name, begin in (
        ("HTML", rb"(?i)(\xef\xbb\xbf)?\s*<(!doctype )?html"),
        ("SVG", rb"(\xef\xbb\xbf)?\s*<(\?xml\b.*<)?svg\b"),
        ("XML", rb"(\xef\xbb\xbf)?\s*<\?xml\b"),
        ("PDF", rb"%PDF-"),
        ("BigTIFF", rb"II\+\x00|MM\x00\+"),
        ("HEIF", rb".{4}ftyp(hei|hev|mif1|msf1)"),
        ("JPEG XL", rb"\xff\x0a|\x00\x00\x00\x0cJXL "),
        ("JPEG 2000", rb"\x00\x00\x00\x0cjP  |\xff\x4f\xff\x51"),
        ("ICO", rb"\x00\x00[\x01\x02]\x00"),
        ("PSD", rb"8BPS"),
        ("ZIP", rb"PK\x03\x04"),
        ("gzip", rb"\x1f\x8b"),
        ("a pointer of Git LFS", rb"version https://git-lfs"),
        ("a data address, as if packed twice", rb"data:[^,]*,"),
        ("base64, as if packed twice", rb"[A-Za-z0-9+/_-]{40}[A-Za-z0-9+/_=\s-]*$"),
        ("text", rb"[\t\n\r -~]+$"),
    )
)
"""Formats that callers send by mistake, by their first bytes."""


def format_of(head: bytes, formats: Mapping[str, Format]) -> str | None:
    """The name of the format that a file's first 512 bytes fit, or None."""
    return next((name for name, each in formats.items() if each.fits(head)), None)


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
    """The body of the first element, which names the kind of document."""
    begin, size = ebml_size(head, 4)
    return head[begin : begin + size]


def check(data: Encoded, formats: Mapping[str, Format], modality: str, mime_type: str, field: str) -> None:
    """Raises InvalidInput unless the bytes begin as one of the modality's formats does, and as the MIME type says."""
    head = bytes(data[:512])
    name = format_of(head, formats)
    if name is None:
        said = f"the bytes are {_found(head)}; {_NOUNS.get(modality, modality)} is taken as {_listed(formats)}"
        raise InvalidInput(said, reason="MEDIA_FORMAT", field=field)
    stated = mime_type.partition(";")[0].strip().lower()
    if stated and stated not in formats[name].mime_types:
        said = f"the MIME type is not that of the bytes, which are {_title(name)}"
        raise InvalidInput(said, reason="MIME_MISMATCH", field=f"{field}.mime_type")


def _found(head: bytes) -> str:
    """The format of a file by its first 512 bytes."""
    if refused := next((name for name, begin in _REFUSED if begin.match(head)), ""):
        return refused
    for noun, formats in (("an image", IMAGES), ("a video", VIDEOS), ("audio", AUDIOS)):
        if name := format_of(head, formats):
            return f"{noun} ({_title(name)})"
    return "of no format that is known"


def _listed(formats: Mapping[str, Format]) -> str:
    *others, last = map(_title, formats)
    return f"{', '.join(others)} or {last}"


def _title(name: str) -> str:
    """A format's name, as it is written."""
    return _TITLES.get(name, name)
