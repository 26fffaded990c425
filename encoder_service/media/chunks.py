"""The parts of pictures: chunks of a PNG, segments and scans of a JPEG, blocks of a GIF. Only their heads are read. For
TIFF see `tiff`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from encoder_service.media.complexity import PartCount, TooComplex
from encoder_service.media.messages import Bounds

_PACKED: Final = frozenset((b"iCCP", b"zTXt", b"iTXt"))
_WEIGHT: Final = 256
"""For how many chunks a packed one counts: the decoder unpacks up to a megabyte of each."""

_MARK: Final = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
"""Ends entropy-coded data: any marker except restart markers. A byte 255 in the data is followed by a zero."""
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ARITHMETIC: Final = 0xC9
_PROGRESSIVE: Final = 2
"""The lower two bits of a progressive frame's marker."""
_FILL, _END, _SCAN = 0xFF, 0xD9, 0xDA
_BARE: Final = frozenset((0x00, 0x01, *range(0xD0, 0xD9), _FILL))
"""Markers without a segment; a zero is none, and of bytes of 255 in a row the last one begins the marker."""

_EXTENSION, _FRAME, _TRAILER = 0x21, 0x2C, 0x3B
_RUN_LENGTHS: Final = (1, 2)
"""Values of a BMP's field of compression that mean RLE8 and RLE4."""


def check(data: bytes, name: str, bounds: Bounds) -> None:
    """Raises TooComplex for a picture of format `name` with too many parts. Of a GIF, those before its first frame
    count, since only that is read. A WebP's parts cost its decoder next to nothing."""
    match name:
        case "PNG":
            _check_png(data, PartCount(bounds.image_chunks))
        case "JPEG":
            read_jpeg(data, bounds)
        case "GIF":
            _check_gif(data, PartCount(bounds.image_chunks))
        case "BMP":
            _check_bmp(data, bounds.packed_bmp_bytes)


def png_chunks(data: bytes) -> Iterator[bytes]:
    """The kind of each chunk of a PNG. Chunks are: length (4 bytes), kind (4), body, checksum (4)."""
    at = 8
    while at + 8 <= len(data):
        yield data[at + 4 : at + 8]
        at += 12 + int.from_bytes(data[at : at + 4], "big")


def png_end(data: bytes, begin: int, count: PartCount) -> int:
    """Where the PNG that begins at `begin` ends; its chunks are counted. Behind the data if it is cut off."""
    at, kind = begin + 8, b""
    while kind != b"IEND" and at < len(data):
        count.add()
        kind = data[at + 4 : at + 8]
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    return at if kind == b"IEND" else len(data) + 1


def _check_png(data: bytes, count: PartCount) -> None:
    for kind in png_chunks(data):
        count.add(_WEIGHT if kind in _PACKED else 1)
        if kind == b"IEND":
            return


def _check_gif(data: bytes, count: PartCount) -> None:
    """A head of 13 bytes and a palette are followed by extensions: a mark, a label, and sub-blocks that begin with
    their length, up to an empty one. Anything else is skipped byte by byte."""
    flags = data[10] if len(data) > 10 else 0
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    while at < len(data) and data[at] not in (_FRAME, _TRAILER):
        count.add()
        if data[at] != _EXTENSION:
            at += 1
            continue
        at += 2
        while at < len(data) and data[at]:
            count.add()
            at += 1 + data[at]
        at += 1


def _check_bmp(data: bytes, max_bytes: int) -> None:
    """The library unpacks run lengths in Python, run by run, and a run may take two bytes."""
    begin, head, packing = (int.from_bytes(data[at : at + 4], "little") for at in (10, 14, 30))
    if head >= 40 and packing in _RUN_LENGTHS and len(data) - begin > max_bytes:
        raise TooComplex("a BMP with too many packed bytes")


@dataclass(frozen=True, slots=True)
class JpegLayout:
    """`end` is where the first picture's end mark begins, or the file's length if it has none. `by_scans`: no scan
    holds the whole picture. `arithmetic` is its coding. `lacking`: scans are missing."""

    end: int
    by_scans: bool
    arithmetic: bool
    lacking: bool


class _Scans:
    """What the scans of a JPEG cover. A progressive one codes the upper bits of values first, and the rest later."""

    def __init__(self, max_scans: int) -> None:
        self._count = PartCount(max_scans)
        self._components: frozenset[int] = frozenset()
        self._progressive = False
        self._seen: set[int] = set()
        self._rough: set[tuple[int, int]] = set()
        """Components and numbers of coefficients whose last bits are missing."""
        self.by_scans = False
        self.arithmetic = False

    def begin(self, number: int, head: bytes) -> None:
        """The frame's segment: precision, height and width, a count, and three bytes for each component."""
        self._components = frozenset(head[6::3])
        self.by_scans = self._progressive = number & 3 == _PROGRESSIVE
        self.arithmetic = number >= _ARITHMETIC

    def add(self, head: bytes) -> None:
        """A scan's segment: a count, two bytes for each component, the first and last coefficient, bit positions."""
        self._count.add()
        named = head[1:-3:2]
        self.by_scans = self.by_scans or len(named) < len(self._components)
        self._seen.update(named)
        if self._progressive and len(head) > 3:
            first, last, low_bit = head[-3], min(head[-2], 63), head[-1] & 15
            places = {(each, number) for each in named for number in range(first, last + 1)}
            self._rough = self._rough | places if low_bit else self._rough - places

    @property
    def lacking(self) -> bool:
        """A component has no scan at all, or values are never completed: the file has lost its last scans."""
        return bool(self._rough) or not self._components <= self._seen


def read_jpeg(data: bytes, bounds: Bounds, begin: int = 0) -> JpegLayout:
    """The layout of a JPEG's first picture, or of the one that begins at `begin`. Raises TooComplex for too many
    segments or scans.

    Bytes between segments, which a decoder skips one by one, count as segments.
    """
    count, scans = PartCount(bounds.image_chunks), _Scans(bounds.image_scans)
    at, end = begin + 2, len(data)
    while (mark := data.find(b"\xff", at)) >= 0:
        count.add(1 + mark - at)
        number = int.from_bytes(data[mark + 1 : mark + 2], "big")
        if number == _END:
            end = mark
            break
        at = mark + (1 if number == _FILL else 2)
        if number in _BARE:
            continue
        head = data[at + 2 : at + int.from_bytes(data[at : at + 2], "big")]
        at += 2 + len(head)
        if number in _FRAMES:
            scans.begin(number, head)
        elif number == _SCAN:
            scans.add(head)
            found = _MARK.search(data, at)
            at = found.start() if found else len(data)
    return JpegLayout(end, scans.by_scans, scans.arithmetic, scans.lacking)
