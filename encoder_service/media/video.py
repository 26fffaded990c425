"""Videos in the decode process: decord, which decodes only the frames that are wanted."""

from __future__ import annotations

import importlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from encoder_service.item import Inspection
from encoder_service.media.sniff import video_format

_AT_ONCE = 8
"""Frames decoded in one call, so that memory does not grow with a video's length."""


def prepare() -> None:
    """Loads the library before the first video comes."""
    importlib.import_module("decord")


def inspect(data: bytes, threads: int = 1) -> Inspection:
    """A video's frame size, number of frames and frames per second. One frame is decoded, for its size."""
    reader = _open(data, threads)
    frames = len(reader)
    if frames < 1:
        raise ValueError("the video has no frames")
    height, width = reader[0].shape[:2]
    return Inspection(width=int(width), height=int(height), frames=frames, fps=float(reader.get_avg_fps()))


def decode(data: bytes, frames: Sequence[int], out: np.ndarray, threads: int = 1) -> None:
    """Writes frames by number into `out`, [len(frames), height, width, 3] uint8."""
    reader = _open(data, threads)
    for start in range(0, len(frames), _AT_ONCE):
        batch = reader.get_batch(list(frames[start : start + _AT_ONCE])).asnumpy()
        if batch.shape[1:] != out.shape[1:]:
            raise ValueError("a frame's size changed in the middle of the video")
        out[start : start + len(batch)] = batch


def _open(data: bytes, threads: int) -> Any:
    if video_format(data[:512]) is None:
        raise ValueError("not a video of a supported format")
    import decord

    try:
        return decord.VideoReader(io.BytesIO(data), num_threads=threads)
    except decord.DECORDError as error:
        raise ValueError("the video cannot be opened") from error
