"""A video together with its own sound, in the decode process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from encoder_service.item import Inspection
from encoder_service.media.audio import AudioFile, read_track
from encoder_service.media.messages import DecoderSettings
from encoder_service.media.sniff import VIDEOS, format_of
from encoder_service.media.video import VideoFile


class SoundingVideoFile:
    """A video file whose sound is taken as well (`__main__.SoundingFile`): the sound is decoded completely, since only
    then is its length known. A file without sound is like any other."""

    def __init__(self, data: bytes, settings: DecoderSettings) -> None:
        self._video = VideoFile(data, settings)
        self._track: Inspection | None = None
        self.samples = np.empty(0, np.float32)
        if format_of(data[:512], VIDEOS) != "FRAMES" and (found := read_track(data, settings.bounds)):
            self._track, self.samples = found

    @staticmethod
    def prepare() -> None:
        """Imports what reads both."""
        VideoFile.prepare()
        AudioFile.prepare()

    def inspect(self) -> Inspection:
        return replace(self._video.inspect(), track=self._track)

    def decode(self, frames: Sequence[int], out: np.ndarray) -> Iterator[int]:
        return self._video.decode(frames, out)
