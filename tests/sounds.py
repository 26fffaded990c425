"""Sounds for tests, and files of them."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from tests import pictures

RATE = 16_000
KINDS = {
    "wav": ("wav", "pcm_s16le"),
    "mp3": ("mp3", "libmp3lame"),
    "flac": ("flac", "flac"),
    "opus": ("ogg", "libopus"),
    "m4a": ("ipod", "aac"),
    "webm": ("webm", "libopus"),
}
"""Container and codec of each."""
STEREO = {"vorbis": ("ogg", "vorbis")}
"""The same of what FFmpeg's own encoder makes of two channels alone."""


_LAYOUTS = {1: "mono", 2: "stereo", 6: "5.1", 8: "7.1"}


def tune(seconds: float, seed: int = 0, rate: int = RATE) -> np.ndarray:
    """Tones that come and go over some noise, [n] int16; each seed gives others."""
    rng = np.random.default_rng(seed)
    at = np.arange(round(seconds * rate)) / rate
    tones = np.zeros(len(at))
    for _ in range(5):
        frequency, slow, phase = rng.uniform(80, 4000), rng.uniform(0.2, 3), rng.uniform(0, 6)
        tones += np.sin(2 * np.pi * frequency * at) * np.sin(2 * np.pi * slow * at + phase) ** 2
    return np.round((tones / 6 + rng.normal(0, 0.01, len(at))) * 20_000).astype(np.int16)


def encoded(samples: np.ndarray, kind: str = "wav", rate: int = RATE) -> bytes:
    """A file of int16 samples, [n], or [channels, n]."""
    import av

    container, codec = (KINDS | STEREO)[kind]
    lines = samples.reshape(-1, samples.shape[-1])
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        stream: Any = out.add_stream(codec, rate=rate, layout=_LAYOUTS[len(lines)])
        stream.codec_context.options = {"strict": "experimental"}
        _write(out, stream, lines, rate)
    return file.getvalue()


FILMS = {
    "mp4": ("mp4", "mpeg4", "aac"),
    "matroska": ("matroska", "mpeg4", "pcm_s16le"),
    "avi": ("avi", "mpeg4", "pcm_s16le"),
    "flv": ("flv", "flv1", "aac"),
    "mpegts": ("mpegts", "mpeg2video", "mp2"),
}
"""Container, and codecs of pictures and sound, of each."""


def film(samples: np.ndarray, kind: str = "mp4", rate: int = RATE, count: int = 5) -> bytes:
    """A video of `count` frames, five a second, with these samples, [n] or [channels, n], as its sound."""
    import av

    container, pictured, codec = FILMS[kind]
    lines = np.atleast_2d(samples)
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        seen: Any = out.add_stream(pictured, rate=25 if kind == "mpegts" else 5)
        seen.height, seen.width, seen.pix_fmt = 64, 64, "yuv420p"
        heard: Any = out.add_stream(codec, rate=rate, layout=_LAYOUTS[len(lines)])
        for frame in pictures.frames(count, 64, 64):
            out.mux(seen.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        out.mux(seen.encode())
        if samples.size:
            _write(out, heard, lines, rate)
    return file.getvalue()


def _write(out: Any, stream: Any, lines: np.ndarray, rate: int) -> None:
    import av

    frame = av.AudioFrame.from_ndarray(
        np.ascontiguousarray(lines.T).reshape(1, -1), format="s16", layout=_LAYOUTS[len(lines)]
    )
    frame.sample_rate = rate
    out.mux(stream.encode(frame))
    out.mux(stream.encode())
