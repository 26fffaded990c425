"""PyAV in the decode process, if it is installed, imported completely, since no file can be opened later when the first
stream of a kind arrives."""

from __future__ import annotations

from typing import Final

try:
    # The others are what `av` would import at the first stream or frame of their kind.
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
except ImportError:  # environments that were put together by hand may lack it
    av = None  # type: ignore[assignment]

from encoder_service.media.sniff import AUDIOS, VIDEOS

DEMUXERS: Final = {name: name.lower() for name in (*AUDIOS, *VIDEOS)} | {"MP4": "mov"}
"""PyAV's names of the formats, so that a file is read as the format that its first bytes show."""

__all__ = ["DEMUXERS", "av"]
