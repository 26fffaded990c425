"""Videos in the decode process: by decord, which decodes only the requested frames, and lists of pictures."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from encoder_service.item import Inspection
from encoder_service.media import timed_video, transport_stream
from encoder_service.media.container import check_parts, is_whole
from encoder_service.media.image import ImageFile
from encoder_service.media.listed_frames import ListedFrames
from encoder_service.media.messages import DecoderSettings
from encoder_service.media.pyav import av
from encoder_service.media.sniff import VIDEOS, format_of

_AT_ONCE = 8
"""Frames decoded in one call, so that memory does not grow with a video's length."""
_MAX_PARTS = 500_000
"""Boxes, elements or packets of a file, unless told otherwise."""
_NARROW = 192
"""Line widths in pixels below which padding at the end of lines, to multiples of 64 pixels, may be taken for another
channel."""


@cache
def library() -> Any:
    """decord, without other libraries.

    If CUDA libraries are installed as packages, as for GPU builds of torch, decord's import would load them all, for
    decoding on GPUs: 3 GB of address space, which counts against a decode process's bound, and 360 MB of memory in
    each. One of them, libnvblas, would even replace torch's BLAS if torch is imported later, and crash at its first
    matrix product. These packages are hidden during the import.
    """
    before = {"nvidia": sys.modules.pop("nvidia")} if "nvidia" in sys.modules else {}
    sys.modules["nvidia"] = None  # type: ignore[assignment] # the language's own way to say that there is none
    try:
        import decord  # noqa: TID251 - here, and nowhere else

        return decord
    finally:
        del sys.modules["nvidia"]
        sys.modules.update(before)


def open_reader(data: bytes, threads: int = 1, max_parts: int = _MAX_PARTS) -> Any:
    """A reader of the video's frames, upright; raises ValueError if it cannot be read, or is incomplete, and TooComplex
    if it has more parts than that."""
    name = format_of(data[:512], VIDEOS)
    if name is None:
        raise ValueError("not a video of a supported format")
    check_parts(data, max_parts)
    if not is_whole(data):
        raise ValueError("the video is cut off")
    if name == "MPEGTS":
        data, name = transport_stream.as_matroska(data, max_parts), "MATROSKA"
    if av is not None:
        timeline = timed_video.read_timeline(data, name, max_parts)
        if not timeline.is_plain:
            return timed_video.TimedReader(data, name, timeline, threads)
    with _readable():
        return library().VideoReader(io.BytesIO(data), num_threads=threads)


class VideoFile:
    """A video's file in the decode process (`__main__.OpenFile`)."""

    def __init__(self, data: bytes, settings: DecoderSettings) -> None:
        self._listed = ListedFrames(data, settings.bounds) if format_of(data[:512], VIDEOS) == "FRAMES" else None
        if self._listed is None:
            self._reader = open_reader(data, settings.threads, settings.bounds.video_chunks)

    @staticmethod
    def prepare() -> None:
        """Loads the decoders' libraries."""
        library()
        ImageFile.prepare()

    def inspect(self) -> Inspection:
        return inspect(self._reader) if self._listed is None else self._listed.inspect()

    def decode(self, frames: Sequence[int], out: np.ndarray) -> Iterator[int]:
        return decode(self._reader, frames, out) if self._listed is None else self._listed.decode(frames, out)


def inspect(reader: Any) -> Inspection:
    """A video's frame size, number of frames and frames per second. One frame is decoded, for its size."""
    frames = len(reader)
    if frames < 1:
        raise ValueError("the video has no frames")
    with _readable():
        height, width = reader[0].shape[:2]
    return Inspection(width=int(width), height=int(height), frames=frames, fps=float(reader.get_avg_fps()))


def decode(reader: Any, frames: Sequence[int], out: np.ndarray) -> Iterator[int]:
    """Writes frames by number into `out`, [len(frames), height, width, 3] uint8; yields the number written so far."""
    for start in range(0, len(frames), _AT_ONCE):
        batch = _frames(reader, list(frames[start : start + _AT_ONCE]), narrow=out.shape[2] < _NARROW)
        if batch.shape[1:] != out.shape[1:]:
            raise ValueError("a frame's size changed in the middle of the video")
        out[start : start + len(batch)] = batch
        yield start + len(batch)


def _frames(reader: Any, numbers: list[int], *, narrow: bool) -> np.ndarray:
    with _readable():
        return np.stack([_frame(reader, each) for each in numbers]) if narrow else reader.get_batch(numbers).asnumpy()


@contextmanager
def _readable() -> Iterator[None]:
    """Turns the library's error, a plain Exception, into ValueError."""
    try:
        yield
    except library().DECORDError as error:
        raise ValueError("the video cannot be read") from error


def _frame(reader: Any, number: int) -> np.ndarray:
    """One frame, [height, width, 3]. If the padding of a line is a multiple of its pixels, the library takes it for
    further channels, and cannot put frames together."""
    frame = reader[number].asnumpy()
    height, width = frame.shape[:2]
    lines: np.ndarray = frame.reshape(height, -1)[:, : 3 * width]
    return lines.reshape(height, width, 3)
