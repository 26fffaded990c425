"""The first page of a TIFF, reduced to the tags that say where its pixels are, and how. Libraries know hundreds of
tags, of cameras, other pages and private ones, and read all that a file has."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from encoder_service.media.complexity import PartCount, TooComplex, UnusualKind
from encoder_service.media.messages import Bounds

_KIND, _WIDTH, _HEIGHT, _BITS, _PACKING, _COLOURS, _ORIENTATION = 254, 256, 257, 258, 259, 262, 274
_SAMPLES, _PLANES, _SAMPLE_FORMAT = 277, 284, 339
_STRIPS, _STRIP_SIZES, _STRIP_ROWS = 273, 279, 278
_TILES, _TILE_SIZES, _TILE_WIDTH, _TILE_HEIGHT = 324, 325, 322, 323
_KEPT: Final = frozenset(
    (
        *(_WIDTH, _HEIGHT, _BITS, _PACKING, _COLOURS, _SAMPLES, _PLANES, _SAMPLE_FORMAT),
        *(_STRIPS, _STRIP_SIZES, _STRIP_ROWS, _TILES, _TILE_SIZES, _TILE_WIDTH, _TILE_HEIGHT),
        *(266, 292, 293, 317, 320, 338),  # bit order, fax options, predictor, palette, extra samples
        *(347, 529, 530, 531, 532),  # JPEG tables, and YCbCr parameters
    )
)
_SIZES: Final = {1: 1, 3: 2, 4: 4, 5: 8, 7: 1}
"""Bytes of a value of each type that kept tags have: byte, short, long, fraction, and bytes of no kind."""
_FORMATS: Final = {1: "B", 3: "H", 4: "I"}

_PLAIN, _JPEG = 1, 7
_PACKINGS: Final = frozenset((_PLAIN, 2, 3, 4, 5, _JPEG, 8, 32773, 32946))
"""Plain, three kinds of fax, LZW, JPEG, Deflate by both of its numbers, PackBits. Not the old JPEG, number 6."""
_WHITE_IS_ZERO, _YCBCR = 0, 6
_COLOURS_TAKEN: Final = frozenset((_WHITE_IS_ZERO, 1, 2, 3, 5, _YCBCR))
"""Grey of both kinds, RGB, palettes, CMYK, YCbCr."""
_MOST_BITS, _WHOLE_NUMBERS, _SMALLER_PICTURE, _APART = 16, 1, 1, 2


@dataclass(frozen=True, slots=True)
class Page:
    """The first page of a file `data`: its tags, [type, count, value or place], in the file's `order` of bytes."""

    data: bytes
    order: str
    tags: Mapping[int, tuple[int, int, bytes]]
    orientation: int

    @property
    def is_inverted(self) -> bool:
        """Whether it is 16-bit grey with white as zero, which Pillow shows as if zero were black."""
        return self._number(_COLOURS) == _WHITE_IS_ZERO and _MOST_BITS in self.numbers(_BITS)

    def numbers(self, tag: int) -> tuple[int, ...]:
        """The values of a tag; empty if it is missing."""
        if tag not in self.tags:
            return ()
        kind, count, value = self.tags[tag]
        if kind not in _FORMATS:
            raise ValueError(f"values of tag {tag} are no numbers")
        found: tuple[int, ...] = struct.unpack(f"{self.order}{count}{_FORMATS[kind]}", self._bytes(kind, count, value))
        return found

    def alone(self) -> bytes:
        """A file of this page and nothing else but bytes that no tag leads to."""
        padded = self.data + bytes(len(self.data) % 2)
        head = padded[:4] + struct.pack(self.order + "I", len(padded))
        entries = (
            struct.pack(self.order + "HHI", tag, *self.tags[tag][:2]) + self.tags[tag][2] for tag in sorted(self.tags)
        )
        return head + padded[8:] + struct.pack(self.order + "H", len(self.tags)) + b"".join(entries) + bytes(4)

    def check_taken(self) -> None:
        """Raises UnusualKind for numbers that no range of brightness follows from, and for packings and colours that
        hardly anybody has. A camera's raw file begins with a smaller picture."""
        packing, colours = self._number(_PACKING, _PLAIN), self._number(_COLOURS)
        bits = self.numbers(_BITS) or (1,)
        taken = (
            packing in _PACKINGS
            and colours in _COLOURS_TAKEN
            and not (colours == _YCBCR and packing == _PLAIN)
            and max(bits) <= _MOST_BITS
            and set(self.numbers(_SAMPLE_FORMAT)) <= {_WHOLE_NUMBERS}
            and not self._number(_KIND, 0) & _SMALLER_PICTURE
        )
        if not taken:
            raise UnusualKind("a TIFF of an unusual kind")

    def check_whole(self) -> None:
        """Raises ValueError if strips or tiles are missing or cut off, since the library would show black there, or
        grey for JPEG; and TooComplex if they share bytes too often."""
        height, width = self._number(_HEIGHT), self._number(_WIDTH)
        if _STRIPS in self.tags:
            places, sizes = self.numbers(_STRIPS), self.numbers(_STRIP_SIZES)
            wanted = -(-height // max(1, min(self._number(_STRIP_ROWS, height), height)))
        else:
            places, sizes = self.numbers(_TILES), self.numbers(_TILE_SIZES)
            sides = (width, _TILE_WIDTH), (height, _TILE_HEIGHT)
            wanted = math.prod(-(-length // max(1, self._number(tag, 1))) for length, tag in sides)
        if self._number(_PLANES, 1) == _APART:
            wanted *= self._number(_SAMPLES, 1)
        if len(places) < wanted or any(at + size > len(self.data) for at, size in zip(places, sizes, strict=True)):
            raise ValueError("the picture is cut off")
        if sum(sizes) > len(self.data):
            raise TooComplex("parts of the picture lie over each other")

    def _number(self, tag: int, default: int = -1) -> int:
        return next(iter(self.numbers(tag)), default)

    def _bytes(self, kind: int, count: int, value: bytes) -> bytes:
        size = count * _SIZES[kind]
        if size <= len(value):
            return value[:size]
        (at,) = struct.unpack(self.order + "I", value)
        if at + size > len(self.data):
            raise ValueError("a tag leads out of the file")
        return self.data[at : at + size]


def first_page(data: bytes, bounds: Bounds) -> Page:
    """Reads the tags of the first page only. Each tag counts, and each value of those that libraries read. Raises
    ValueError, TooComplex and UnusualKind."""
    order, count = "<" if data.startswith(b"II") else ">", PartCount(bounds.image_chunks)
    (at,) = struct.unpack_from(order + "I", data, 4)
    (entries,) = struct.unpack_from(order + "H", data, at)
    tags: dict[int, tuple[int, int, bytes]] = {}
    for place in range(at + 2, at + 2 + 12 * entries, 12):
        tag, kind, values, value = struct.unpack_from(order + "HHI4s", data, place)
        count.add()
        if tag not in tags and tag in _KEPT | {_KIND, _ORIENTATION} and kind in _SIZES:
            count.add(0 if _SIZES[kind] == 1 else values)
            tags[tag] = kind, values, value
    page = Page(data, order, tags, 1)
    if math.prod(page._number(side, 0) for side in (_WIDTH, _HEIGHT)) == 0:
        raise ValueError("the picture has no size")
    page.check_taken()
    kept = {tag: known for tag, known in tags.items() if tag in _KEPT}
    return Page(data, order, kept, page._number(_ORIENTATION, 1))
