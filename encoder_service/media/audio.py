"""Sound in the decode process: PyAV, held to the formats that were named by their first bytes. What comes of a file, or
of a video's own track, is mono, of as many samples a second as the model takes: other rates are resampled, and channels
averaged, or, of a video that is shown with its sound, mixed."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from encoder_service.item import SAMPLE_RATE, Inspection
from encoder_service.media.complexity import PartCount
from encoder_service.media.container import check_parts, is_whole
from encoder_service.media.messages import Bounds, DecoderSettings
from encoder_service.media.pyav import DEMUXERS, av
from encoder_service.media.sniff import AUDIOS, VIDEOS, format_of

_NO_PACKAGE = "sound takes a package that is not installed"
_LOUDEST = 1e4
"""Samples of floating point beyond this are no sound; full scale is 1."""
_UNKNOWN = 0x7FFFF000
"""From here on are the sizes that WAV files state whose length was not known when they were begun, by SoX, arecord and
FFmpeg; or they state 0."""


class AudioFile:
    """A file with sound in the decode process (`__main__.OpenFile`): all of it is decoded at once, since few files say
    how long they are."""

    def __init__(self, data: bytes, settings: DecoderSettings) -> None:
        self._seen, self._samples = read(data, settings.bounds)

    @staticmethod
    def prepare() -> None:
        """Decodes and resamples a moment of silence, which imports the rest."""
        if av is not None:
            silence = bytes(1600)
            rate = (8000).to_bytes(4, "little") + (16000).to_bytes(4, "little")
            head = b"RIFF" + (36 + len(silence)).to_bytes(4, "little") + b"WAVEfmt \x10\0\0\0\1\0\1\0" + rate
            _decode(head + b"\2\0\x10\0data" + len(silence).to_bytes(4, "little") + silence, "WAV", 1 << 20, 100)

    def inspect(self) -> Inspection:
        return self._seen

    def decode(self, frames: Sequence[int], out: np.ndarray) -> Iterator[int]:
        """Writes the samples, float32, into `out`, [1, 1, samples, 4] uint8."""
        out.reshape(-1).view(np.float32)[:] = self._samples
        yield len(frames)


def read(data: bytes, bounds: Bounds) -> tuple[Inspection, np.ndarray]:
    """What a file is, and its samples [n] float32 at the bounds' rate, one more than are taken at most; none where
    its rate or its channels are more than are taken.

    Raises ValueError where it cannot be read, or is not all there, and TooComplex for too many parts.
    """
    name = format_of(data[:512], AUDIOS)
    if name is None:
        raise ValueError("not sound of a supported format")
    check_parts(data, bounds.video_chunks)
    if not (is_whole(data) and _wav_is_whole(data, name)):
        raise ValueError("the file is cut off")
    found = _track(data, name, bounds)
    if found is None:
        raise ValueError("there is no sound")
    return found


def read_track(data: bytes, bounds: Bounds) -> tuple[Inspection, np.ndarray] | None:
    """The same of a video's own sound, whose channels are mixed as FFmpeg does it, and with it the library: two become
    (left + right) / √2. None where it has none. It has been opened as a video, and so is whole."""
    name = format_of(data[:512], VIDEOS)
    if name is None:
        raise ValueError("not a video of a supported format")
    return _track(data, name, bounds, layout="mono")


def _track(data: bytes, name: str, bounds: Bounds, layout: str | None = None) -> tuple[Inspection, np.ndarray] | None:
    if av is None:
        raise ValueError(_NO_PACKAGE)
    try:
        with av.open(io.BytesIO(data), "r", format=DEMUXERS[name]) as file:
            stream: Any = file.streams.best("audio")
            if stream is None and not file.streams.audio:
                return None
            if stream is None or stream.codec_context is None:  # of a codec that nobody knows
                raise ValueError("there is no decodable sound")
            rate, channels = stream.codec_context.sample_rate, stream.codec_context.channels
    except av.FFmpegError as error:
        raise ValueError("the sound cannot be read") from error
    seen = Inspection(width=1, height=1, fps=float(rate), channels=channels, rate=bounds.sample_rate)
    if not 0 < rate <= bounds.audio_rate or not 0 < channels <= bounds.audio_channels:
        return seen, np.empty(0, np.float32)
    most = int(bounds.audio_seconds * bounds.sample_rate)
    samples = _decode(data, name, most, bounds.video_chunks, bounds.sample_rate, layout)
    return replace(seen, frames=len(samples)), samples


def _decode(
    data: bytes, name: str, most: int, max_parts: int, wanted: int = SAMPLE_RATE, layout: str | None = None
) -> np.ndarray:
    """At most `most` samples, `wanted` a second, and one more where there are more; channels are mixed to a `layout`
    before they are averaged."""
    parts, found, given = list[np.ndarray](), 0, 0
    count = PartCount(max_parts)
    try:
        with av.open(io.BytesIO(data), "r", format=DEMUXERS[name]) as file:
            stream: Any = file.streams.best("audio")
            resampler = av.AudioResampler(format="flt", layout=layout, rate=wanted)
            for packet in file.demux(stream):
                count.add()
                for frame in packet.decode():
                    given += frame.samples
                    for piece in resampler.resample(frame):
                        parts.append(_mono(piece))
                        found += len(parts[-1])
                if found > most:
                    break
            else:
                _check_length(data, name, given)
                parts.extend(_mono(piece) for piece in resampler.resample(None))
    except av.FFmpegError as error:
        raise ValueError("the sound cannot be read") from error
    samples = np.concatenate(parts)[: most + 1] if parts else np.empty(0, np.float32)
    if not len(samples):
        raise ValueError("there is no sound")
    if not np.abs(samples).max() <= _LOUDEST:  # nor a NaN
        raise ValueError("a sample is too large, or not a number")
    return samples


def _mono(frame: Any) -> np.ndarray:
    """The mean of all channels, [n] float32. They are interleaved: PyAV takes eight that lie apart for
    more, and reads where nothing is."""
    with np.errstate(invalid="ignore", over="ignore"):  # what is no sound is refused afterwards
        mean: np.ndarray = frame.to_ndarray().reshape(frame.samples, -1).mean(axis=1, dtype=np.float32)
    return mean


def _wav_is_whole(data: bytes, name: str) -> bool:
    """Chunks are: kind (4 bytes), size (4), body, to an even length."""
    at = 12
    while name == "WAV" and at + 8 <= len(data):
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        if data[at : at + 4] == b"data":
            return not 0 < size < _UNKNOWN or at + 8 + size <= len(data)
        at += 8 + size + size % 2
    return True


def _check_length(data: bytes, name: str, given: int) -> None:
    """Raises ValueError where a FLAC file says that it has more samples, of one channel, than came: 36 bits behind 13
    bytes and a half of its first block's body."""
    if name == "FLAC" and given < int.from_bytes(data[21:26], "big") & ((1 << 36) - 1):
        raise ValueError("the file is cut off")
