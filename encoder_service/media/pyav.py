"""PyAV in the decode process, where it is installed: all of it at once, since no file can be opened any more when the
first stream of a kind comes."""

from __future__ import annotations

from typing import Final

try:
    # What is beside `av` is what it would import at the first stream or frame of its kind.
    import av
    import av.audio.codeccontext
    import av.audio.resampler
    import av.audio.stream
    import av.filter
    import av.subtitles.codeccontext
    import av.subtitles.stream
    import av.video.codeccontext
    import av.video.reformatter
    import av.video.stream
except ImportError:  # a machine for a trial, whose environment was put together by hand, does without
    av = None  # type: ignore[assignment]

from encoder_service.media.sniff import AUDIOS, VIDEOS

DEMUXERS: Final = {name: name.lower() for name in (*AUDIOS, *VIDEOS)} | {"MP4": "mov"}
"""What it calls the formats, so that a file is read as what its first bytes say that it is."""

__all__ = ["DEMUXERS", "av"]
