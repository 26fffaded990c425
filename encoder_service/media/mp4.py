"""The boxes of an MP4: how many there are, and whether the file is complete. Only heads and tables are read, the latter
with numpy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from encoder_service.media.complexity import PartCount, TooComplex

_LARGE = 1
"""A box size that means that eight bytes with the size follow the box's kind."""
_TO_THE_END = 0

_NESTS: Final = frozenset(
    b"moov trak mdia minf stbl edts udta meta ilst moof traf mvex mfra dinf wave tref sinf schi cmov".split()
)
"""Boxes that contain boxes."""
_NEEDED: Final = frozenset(b"ftyp styp moov moof mdat mfra sidx meta udta".split())
"""Boxes that must not be cut off by the end of the file. Anything else may not be a box at all."""

_USUAL_EDITS: Final = 2
_REPEATS: Final = 20
"""An edit list may repeat a track's samples, and the library lists every sample shown. A track with more edits than
usual (a pause, and the rest) may show twenty times the parts that a file may have: some ten million, which take half a
second."""
_MIN_SAMPLE: Final = 1 / 8
"""Bytes of the smallest sample of sound in use."""


_NOTHING: Final = memoryview(b"")


@dataclass(frozen=True, slots=True)
class Box:
    """A box whose body is at [begin, end), within its parent; by its own size it extends to `claimed`."""

    kind: bytes
    begin: int
    end: int
    claimed: int
    top: bool


def boxes(data: bytes) -> Iterator[Box]:
    """Every box in the order of the file; children follow their parent."""
    ends, at = [len(data)], 0
    while ends:
        if at + 8 > ends[-1]:
            at = ends.pop()
            continue
        size, kind, begin = _number(data, at), data[at + 4 : at + 8], at + 8
        if size == _LARGE:
            size, begin = int.from_bytes(data[at + 8 : at + 16], "big"), at + 16
        claimed = ends[-1] if size == _TO_THE_END else at + max(size, 8)
        end = min(claimed, ends[-1])
        yield Box(kind, begin, end, claimed, len(ends) == 1)
        if kind in _NESTS and begin <= end:
            ends.append(end)
            # In MP4, unlike in QuickTime, four bytes of version and flags precede the children of a meta box.
            at = begin + 4 if kind == b"meta" and not _number(data, begin) else begin
        else:
            at = end


def count(data: bytes, max_parts: int) -> None:
    """Raises TooComplex for more boxes, edits and samples of fragments than `max_parts`, or too long edits."""
    parts, edits, track = PartCount(max_parts), 0, _Track()
    for box in boxes(data):
        parts.add()
        track.see(box, data)
        match box.kind:
            case b"trak":
                edits, track = 0, _Track()
            case b"elst":
                parts.add(entries := _number(data, box.begin + 4))
                edits += entries
            case b"trun":
                parts.add(_number(data, box.begin + 4))
        if edits > _USUAL_EDITS and edits * track.listed > _REPEATS * max_parts:
            raise TooComplex("an edit list shows too many samples")


def is_whole(data: bytes) -> bool:
    """False if a box, or the samples of a video track, extend beyond the file's end."""
    track = _Track()
    for box in boxes(data):
        if box.top and box.kind in _NEEDED and box.claimed > len(data):
            return False
        if box.kind == b"trak":
            if track.end > len(data):
                return False
            track = _Track()
        track.see(box, data)
    return track.end <= len(data)


@dataclass(slots=True)
class _Track:
    """A track's kind, and where its samples are. Tables are bodies of boxes: four bytes of version and flags, for sizes
    the common size, a count, and big-endian numbers."""

    handler: bytes = b""
    tables: dict[bytes, memoryview] = field(default_factory=dict)

    def see(self, box: Box, data: bytes) -> None:
        """A box that may be one of the track's."""
        if box.kind == b"hdlr" and not self.handler:
            self.handler = data[box.begin + 8 : box.begin + 12]
        elif box.kind in (b"stts", b"stsc", b"stsz", b"stco", b"co64"):
            self.tables[box.kind] = memoryview(data)[box.begin : box.end]

    @property
    def listed(self) -> int:
        """Samples that the library lists one by one: all, except those of plain sound, which last one tick each."""
        times = self.tables.get(b"stts", _NOTHING)
        plain = self.handler == b"soun" and (_number(times, 4), _number(times, 12)) == (1, 1)
        return 0 if plain else _number(self.tables.get(b"stsz", _NOTHING), 8)

    @property
    def end(self) -> int:
        """Where its last sample ends, or would end if it were empty; 0 if a track has no readable tables.

        Samples are in chunks. Chunks of 3 and 1 samples of 10 bytes each, at 100 and 500, end at 510.
        """
        sizes, runs = self.tables.get(b"stsz", _NOTHING), self.tables.get(b"stsc", _NOTHING)
        one, samples = _number(sizes, 4), _number(sizes, 8)
        if self.handler != b"vide":  # for sound, the meaning of a size depends on the codec
            return int(samples * _MIN_SAMPLE) if one else 0
        wide = b"co64" in self.tables
        begins = _numbers(self.tables.get(b"co64" if wide else b"stco", _NOTHING), 8, 1, ">u8" if wide else ">u4")[:, 0]
        if not len(begins) or len(sizes) < 12:
            return 0
        before = np.minimum(_samples_before(_numbers(runs, 8, 3, ">u4"), len(begins)), samples)
        if one:
            lengths = np.diff(before) * one
        else:
            table = _numbers(sizes, 12, 1, ">u4")[:samples, 0]
            lengths = np.diff(np.concatenate(([0], np.cumsum(table)))[np.minimum(before, len(table))])
        ends = np.where(lengths > 0, begins.astype(np.float64) + lengths, 0)  # 64 bits, whose sum might overflow
        return int(ends.max())


def _samples_before(runs: np.ndarray, chunks: int) -> np.ndarray:
    """The number of samples before each chunk, and before the end: [chunks + 1]. A run gives the samples per chunk from
    a chunk on, counted from 1."""
    firsts = np.clip(runs[:, 0].astype(np.int64) - 1, 0, chunks)
    repeats = np.maximum(np.diff(np.append(firsts, chunks)), 0)
    each = np.repeat(runs[:, 1].astype(np.int64), repeats)[:chunks]
    before = np.concatenate(([0], np.cumsum(each)))
    return np.pad(before, (0, chunks + 1 - len(before)), mode="edge")


def _numbers(table: memoryview, head: int, columns: int, kind: str) -> np.ndarray:
    """The rows of a table behind its head: [rows, columns], int64 or smaller."""
    width = np.dtype(kind).itemsize * columns
    rows = max(len(table) - head, 0) // width
    numbers: np.ndarray = np.frombuffer(table, kind, rows * columns, head if rows else 0).reshape(rows, columns)
    return numbers[: _number(table, head - 4)] if len(table) >= head else numbers


def _number(data: bytes | memoryview, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "big")
