"""Videos in the decode process: decord, which decodes only the frames that are wanted."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from encoder_service.item import Inspection
from encoder_service.media.sniff import video_format

_AT_ONCE = 8
"""Frames decoded in one call, so that memory does not grow with a video's length."""


def prepare() -> None:
    """Loads the library before the first video comes."""
    importlib.import_module("decord")


def open_reader(data: bytes, threads: int = 1) -> Any:
    """A reader of the video's frames; raises ValueError where it cannot be read."""
    if video_format(data[:512]) is None:
        raise ValueError("not a video of a supported format")
    import decord

    try:
        return decord.VideoReader(io.BytesIO(data), num_threads=threads)
    except decord.DECORDError as error:
        raise ValueError("the video cannot be opened") from error


def inspect(reader: Any) -> Inspection:
    """A video's frame size, number of frames and frames per second. One frame is decoded, for its size."""
    frames = len(reader)
    if frames < 1:
        raise ValueError("the video has no frames")
    height, width = reader[0].shape[:2]
    return Inspection(width=int(width), height=int(height), frames=frames, fps=float(reader.get_avg_fps()))


def decode(reader: Any, frames: Sequence[int], out: np.ndarray) -> Iterator[int]:
    """Writes frames by number into `out`, [len(frames), height, width, 3] uint8; yields how many are there by now."""
    for start in range(0, len(frames), _AT_ONCE):
        batch = reader.get_batch(list(frames[start : start + _AT_ONCE])).asnumpy()
        if batch.shape[1:] != out.shape[1:]:
            raise ValueError("a frame's size changed in the middle of the video")
        out[start : start + len(batch)] = batch
        yield start + len(batch)
