"""Sound in the decode process, by PyAV, restricted to the format that the first bytes show. The sound of a file, or of
a video's own track, becomes mono at the model's sample rate: it is resampled, and channels are averaged, or mixed for a
video that is shown with its sound."""

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
"""Sizes from here on are written by SoX, arecord and FFmpeg into WAV files whose length was not known at first; others
write 0."""


class AudioFile:
    """A file with sound in the decode process (`__main__.OpenFile`): it is decoded all at once, since few files state
    their length."""

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
    """The file's description, and its samples [n] float32 at the bounds' rate, one more than allowed at most; none if
    its rate or number of channels exceeds the limits.

    Raises ValueError if it cannot be read, or is incomplete, and TooComplex for too many parts.
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
    """The same for a video's own sound, whose channels are mixed as FFmpeg does: two become (left + right) / √2. None
    if it has none. It was opened as a video before, and so is complete."""
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
            if stream is None or stream.codec_context is None:  # an unknown codec
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
    """At most `most` samples at `wanted` per second, and one more if there are more; channels are mixed to a `layout`
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
    if not np.abs(samples).max() <= _LOUDEST:  # a NaN as well
        raise ValueError("a sample is too large, or not a number")
    return samples


def _mono(frame: Any) -> np.ndarray:
    """The mean of all channels, [n] float32. Channels are interleaved: PyAV misreads planar sound of eight channels."""
    with np.errstate(invalid="ignore", over="ignore"):  # invalid samples are refused afterwards
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
    """Raises ValueError if a FLAC file states more samples, per channel, than arrived: 36 bits, 13 and a half bytes
    into its first block's body."""
    if name == "FLAC" and given < int.from_bytes(data[21:26], "big") & ((1 << 36) - 1):
        raise ValueError("the file is cut off")
