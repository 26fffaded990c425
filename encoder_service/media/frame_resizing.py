"""Resizes video frames in the decode process, so that only a few full-size frames exist at a time; and pictures whose
model's processor has no bounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from PIL import Image

_AT_ONCE = 8
"""Frames that are decoded before they are resized."""


class Frames(Protocol):
    """A video's file, as far as it is asked here (`__main__.OpenFile`)."""

    def decode(self, frames: Sequence[int], out: np.ndarray) -> Iterator[int]:
        """Writes frames by number into `out`, [len(frames), height, width, 3] uint8; yields the number written so
        far."""
        ...


def decode_resized(file: Frames, numbers: Sequence[int], whole: tuple[int, int], out: np.ndarray) -> Iterator[int]:
    """As `Frames.decode`, with frames of `whole` (height, width), each resized to the size in `out`, antialiased
    bicubic. Pillow's weights have 22 bits and torch's 15, so one number in some hundreds differs by one."""
    room = np.empty((min(_AT_ONCE, len(numbers)), *whole, 3), np.uint8)
    size = out.shape[2], out.shape[1]
    for first in range(0, len(numbers), _AT_ONCE):
        some = numbers[first : first + _AT_ONCE]
        for _ in file.decode(some, room[: len(some)]):
            pass
        for place, frame in enumerate(room[: len(some)], start=first):
            out[place] = Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC)
        yield first + len(some)
