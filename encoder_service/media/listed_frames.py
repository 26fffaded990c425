"""Videos that are lists of pictures, one JPEG, PNG or WebP behind the other, as `data:video/jpeg` addresses have them:
whoever has chosen the frames of a video sends these alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from encoder_service.item import LISTED_FPS, Inspection
from encoder_service.media import chunks, image
from encoder_service.media.complexity import PartCount
from encoder_service.media.messages import Bounds
from encoder_service.media.sniff import IMAGES, format_of

_END_BYTES: Final = 2
"""Of the mark that ends a JPEG."""
_HEAD: Final = 16
"""Bytes by which a picture's format is told."""


class ListedFrames:
    """Its frames, which are read one by one. Raises ValueError where there is something else between them, or the last
    one has no end, and TooComplex."""

    def __init__(self, data: bytes, bounds: Bounds) -> None:
        self._data, self._bounds = data, bounds
        self._places: list[tuple[int, int]] = []
        count, at = PartCount(bounds.video_chunks), 0
        while at < len(data):
            count.add()
            end = _end(data, at, bounds, count)
            if end > len(data):
                raise ValueError("the last frame is cut off")
            self._places.append((at, end))
            at = end

    def inspect(self) -> Inspection:
        """The size of the first frame, and how many there are."""
        seen = image.inspect(self._frame(0), self._bounds)
        return Inspection(seen.width, seen.height, len(self._places), LISTED_FPS, listed=True)

    def decode(self, frames: Sequence[int], out: np.ndarray) -> Iterator[int]:
        """See `__main__.OpenFile`. Raises ValueError where a frame has another size than the first."""
        for place, number in enumerate(frames):
            if place and number == frames[place - 1]:  # the last one fills a group of frames
                out[place] = out[place - 1]
            else:
                image.decode(self._frame(number), out[place : place + 1], self._bounds)
            yield place + 1

    def _frame(self, number: int) -> bytes:
        begin, end = self._places[number]
        return self._data[begin:end]


def _end(data: bytes, begin: int, bounds: Bounds, count: PartCount) -> int:
    """Where the picture ends that begins there."""
    match format_of(data[begin : begin + _HEAD], IMAGES):
        case "JPEG":
            return chunks.read_jpeg(data, bounds, begin).end + _END_BYTES
        case "PNG":
            return chunks.png_end(data, begin, count)
        case "WEBP":  # RIFF: four signs, the length of what follows, and that, with a byte more where it is odd
            size = int.from_bytes(data[begin + 4 : begin + 8], "little")
            return begin + 8 + size + size % 2
    raise ValueError("between two frames is something else")
