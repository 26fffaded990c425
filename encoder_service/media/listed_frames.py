"""Videos that are lists of pictures: JPEGs, PNGs or WebPs one after the other, as in `data:video/jpeg` addresses, by
clients that choose the frames themselves."""

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
"""Bytes needed to recognise a picture's format."""


class ListedFrames:
    """The frames, read one by one. Raises ValueError if there is something else between them, or the last one is cut
    off, and TooComplex."""

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
        """The size of the first frame, and the number of frames."""
        seen = image.inspect(self._frame(0), self._bounds)
        return Inspection(seen.width, seen.height, len(self._places), LISTED_FPS, listed=True)

    def decode(self, frames: Sequence[int], out: np.ndarray) -> Iterator[int]:
        """See `__main__.OpenFile`. Raises ValueError if a frame's size differs from the first one's."""
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
    """Where the picture that begins at `begin` ends."""
    match format_of(data[begin : begin + _HEAD], IMAGES):
        case "JPEG":
            return chunks.read_jpeg(data, bounds, begin).end + _END_BYTES
        case "PNG":
            return chunks.png_end(data, begin, count)
        case "WEBP":  # RIFF: four characters, a length, and the body, padded to an even length
            size = int.from_bytes(data[begin + 4 : begin + 8], "little")
            return begin + 8 + size + size % 2
    raise ValueError("between two frames is something else")
