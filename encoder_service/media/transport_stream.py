"""MPEG-TS in the decode process: its packets are remuxed into a container that has an index, without decoding.

The video library seeks by decoding times, which a transport stream has for every packet, not only for key frames; so it
would begin behind the frame that it looks for, and show a later one.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from encoder_service.media.complexity import PartCount
from encoder_service.media.pyav import av

_WEIGHT = 4
"""For how many parts of a file a packet counts, since it is a whole frame, and is taken up twice."""


def as_matroska(data: bytes, max_parts: int) -> bytes:
    """The video as Matroska: its best stream only, each frame a packet with its own time. Raises ValueError if it
    cannot be read, and TooComplex for more packets than `max_parts`."""
    if av is None:
        raise ValueError("transport streams take a package that is not installed")
    file = io.BytesIO()
    try:
        with av.open(io.BytesIO(data), "r", format="mpegts") as given, av.open(file, "w", format="matroska") as made:
            stream = given.streams.best("video")
            if stream is None:
                raise ValueError("there is no video")
            track = made.add_stream_from_template(stream)
            for packet in _in_order(given.demux(stream), PartCount(max_parts)):
                packet.stream = track
                made.mux(packet)
    except av.FFmpegError as error:
        raise ValueError("the transport stream cannot be read") from error
    return file.getvalue()


def _in_order(packets: Iterator[Any], count: PartCount) -> Iterator[Any]:
    """The packets of a stream that have times. If times jump back, as in concatenated streams, later packets are moved
    behind earlier ones."""
    last, shift = None, 0
    for packet in packets:
        count.add(_WEIGHT)
        time = packet.pts if packet.dts is None else packet.dts
        if time is None or not packet.size:  # the last one is empty
            continue
        if last is not None and time + shift <= last:
            shift = last + max(packet.duration or 0, 1) - time
        last = time + shift
        packet.pts = (time if packet.pts is None else packet.pts) + shift
        packet.dts = last
        yield packet
