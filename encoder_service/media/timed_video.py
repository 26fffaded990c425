"""Videos in the decode process whose frames decord does not find, read by PyAV, which knows each frame's time. decord
counts from the key frame that it seeks to, in file order: wrong if frames behind it are shown before it (MPEG-2 and
HEVC), if an edit list cuts some off, and if a file has no times or index (AVI, FLV)."""

from __future__ import annotations

import bisect
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from encoder_service.media.complexity import PartCount
from encoder_service.media.pyav import DEMUXERS, av

_INDEXED = ("MP4", "MATROSKA")
"""Containers with an index of key frames and times."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a video's packets say about its `count` frames. `times` are when they are shown, in order, in ticks of the
    stream, `key_times` those of key frames; both are empty if frames can only be counted. `is_plain`: the frames behind
    each key frame in the file are exactly those shown after it."""

    count: int
    times: tuple[int, ...]
    key_times: tuple[int, ...]
    is_plain: bool


def read_timeline(data: bytes, name: str, max_parts: int) -> Timeline:
    """The timeline of a video of format `name`. Nothing is decoded: 500 packets take a millisecond. Raises ValueError
    if it cannot be read, and TooComplex for more packets than `max_parts`."""
    parts, found, keys, key_times, cut = PartCount(max_parts), list[int | None](), list[int](), list[int](), 0
    with _readable(), av.open(io.BytesIO(data), "r", format=DEMUXERS[name]) as file:
        for packet in file.demux(_best(file)):
            parts.add()
            if not packet.size:  # the last one
                continue
            if packet.is_keyframe and packet.pts is not None:
                keys.append(len(found))
                key_times.append(packet.pts)
            if packet.is_discard:
                cut += 1
            else:
                found.append(packet.pts)
    times = tuple(sorted({time for time in found if time is not None}))
    if name not in _INDEXED or not 0 < len(times) == len(found):
        return Timeline(len(found), (), (), is_plain=False)
    is_plain = not cut and times[0] >= 0 and keys[:1] == [0] and _are_closed(np.array(found), np.array(keys))
    return Timeline(len(found), times, tuple(sorted(key_times)), is_plain)


def _are_closed(times: np.ndarray, keys: np.ndarray) -> bool:
    """Whether all that stands before each key frame is shown before it, and all behind it behind, by the times of
    frames as they stand in the file. The first of the `keys` is 0.

    >>> _are_closed(np.array([0, 2, 1, 3]), np.array([0, 3])), _are_closed(np.array([0, 2, 1, 3]), np.array([0, 1]))
    (True, False)
    """
    before, behind = np.maximum.accumulate(times), np.minimum.accumulate(times[::-1])[::-1]
    return bool((behind[keys] == times[keys]).all() and (before[keys[1:] - 1] < times[keys[1:]]).all())


@dataclass(frozen=True, slots=True)
class Shown:
    """Pixels as decord has them: of a frame [height, width, 3] uint8, or of several."""

    pixels: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.pixels.shape

    def asnumpy(self) -> np.ndarray:
        """They are."""
        return self.pixels


class TimedReader:
    """Takes the place of decord's VideoReader, as far as `video` uses it. A frame is found by its time, decoding from
    the key frame before it; if there are no times, or no frame at a time, all are counted from the first, and the last
    one stands for missing ones."""

    def __init__(self, data: bytes, name: str, timeline: Timeline, threads: int) -> None:
        self._data = data
        self._name = name
        self._count = timeline.count
        self._times: Sequence[int] = timeline.times
        self._key_times = timeline.key_times
        self._threads = threads
        self._last: tuple[int, np.ndarray] | None = None
        with _readable():
            self._begin()

    def __len__(self) -> int:
        return self._count

    def get_avg_fps(self) -> float:
        """Frames per second; 0 if the file does not say."""
        return float(self._stream.average_rate or 0)

    def __getitem__(self, number: int) -> Shown:
        if self._last is None or self._last[0] != number:
            with _readable():
                frame = self._at_time(self._times[number]) if self._times else None
                self._last = number, _upright(frame or self._counted(number))
        return Shown(self._last[1])

    def get_batch(self, numbers: Sequence[int]) -> Shown:
        """Frames by number, [n, height, width, 3]."""
        return Shown(np.stack([self[number].pixels for number in numbers]))

    def _begin(self) -> None:
        """Goes back to the first frame."""
        self._file = av.open(io.BytesIO(self._data), "r", format=DEMUXERS[self._name])
        self._stream = _best(self._file)
        self._stream.thread_type = "AUTO"
        self._stream.codec_context.thread_count = self._threads
        self._frames: Iterator[Any] = self._file.decode(self._stream)
        self._shown: Any = None
        self._next = 0

    def _at_time(self, time: int) -> Any:
        """The frame shown at this time; None if there is none, after which frames are counted."""
        key = self._key_times[max(bisect.bisect_right(self._key_times, time) - 1, 0)] if self._key_times else 0
        if self._shown is None or not key <= self._shown.pts < time:
            self._file.seek(key, stream=self._stream)
            self._frames = self._file.decode(self._stream)
        for frame in self._frames:
            self._shown = frame
            if frame.pts is None or frame.pts >= time:
                break
        if self._shown is not None and self._shown.pts == time:
            return self._shown
        self._times = ()
        self._begin()
        return None

    def _counted(self, number: int) -> Any:
        if number < self._next - 1:
            self._begin()
        while self._next <= number and (frame := next(self._frames, None)) is not None:
            self._shown = frame
            self._next += 1
        if self._shown is None:
            raise ValueError("the video has no frames")
        return self._shown


def _best(file: Any) -> Any:
    stream = file.streams.best("video")
    if stream is None or stream.codec_context is None:  # an unknown codec
        raise ValueError("there is no decodable video")
    return stream


def _upright(frame: Any) -> np.ndarray:
    """[height, width, 3] uint8; a phone that was held otherwise says so of the whole video."""
    return np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except av.FFmpegError as error:
        raise ValueError("the video cannot be read") from error
