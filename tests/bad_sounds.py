"""Files that are no sound, or not all of one, and what an encoder says of each; "" where it is heard.

What one decoder steps over another one may refuse: the answers are those of the FFmpeg that comes with the PyAV of
constraints.txt.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import numpy as np

from tests import pictures, sounds

_UNREADABLE = "MEDIA_UNREADABLE"
_GROWS = {"mp3": (0.2, 0.5, 0.9), "opus": (0.9,)}
"""Made to be sent as they grow: so much of one is a whole file. Of Ogg that is at least a page, of a second."""
_STEPS_OVER = {"wav": (0.3, 0.7), "opus": (0.7,), "webm": (0.3, 0.7)}
"""Where damage begins behind which a decoder finds its way, or in front of which there is enough: samples of WAV may be
any bytes, a page of Ogg with a wrong checksum is left out, and of WebM what is no element."""

Bad = tuple[bytes, str]


def _made() -> Iterator[tuple[str, Bad]]:
    rng = np.random.default_rng(3)
    tune = sounds.tune(1.5, 5)
    for kind in sounds.KINDS:
        rate = 48_000 if kind in ("opus", "webm") else sounds.RATE
        whole = sounds.encoded(sounds.tune(1.5, 5, rate), kind, rate)
        for share in (0.2, 0.5, 0.9):
            cut = "" if share in _GROWS.get(kind, ()) else _UNREADABLE
            yield f"{kind}, {share:.0%} of it", (whole[: int(share * len(whole))], cut)
        for share in (0.3, 0.7):
            begin = int(share * len(whole))
            damaged = "" if share in _STEPS_OVER.get(kind, ()) else _UNREADABLE
            yield f"{kind}, zeros from {share:.0%}", (whole[:begin] + bytes(len(whole) - begin), damaged)
            noise = rng.integers(0, 256, len(whole) - begin, dtype=np.uint8).tobytes()
            yield f"{kind}, noise from {share:.0%}", (whole[:begin] + noise, damaged)
        yield f"{kind}, its first bytes alone", (whole[:40], _UNREADABLE)
    yield from _waves(sounds.encoded(tune))
    yield "nothing", (b"", "MEDIA_EMPTY")
    yield "noise", (rng.bytes(1000), "MEDIA_FORMAT")
    yield "a picture", (pictures.encoded(pictures.noise(32, 32)), "MEDIA_FORMAT")
    yield "a playlist", (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "MEDIA_FORMAT")
    yield "a video without sound", (pictures.video(pictures.frames(4, 64, 64)), _UNREADABLE)
    yield "longer than any model hears", (sounds.encoded(np.zeros(16_000 * 40, np.int16), "flac"), "AUDIO_TOO_LONG")
    yield "a sample", (sounds.encoded(tune[:1]), "AUDIO_TOO_SHORT")


def _waves(whole: bytes) -> Iterator[tuple[str, Bad]]:
    """WAV files whose head says something else; numbers are little endian."""
    head = whole.index(b"fmt ") + 8
    data = whole.index(b"data") + 4

    def said(at: int, size: int, value: int) -> bytes:
        return whole[:at] + value.to_bytes(size, "little") + whole[at + size :]

    for name, at, size, value, reason in (
        ("no channel", head + 2, 2, 0, _UNREADABLE),
        ("65535 channels", head + 2, 2, 65_535, _UNREADABLE),
        ("no rate", head + 4, 4, 0, _UNREADABLE),
        ("a rate of 1", head + 4, 4, 1, "AUDIO_TOO_LONG"),
        ("the highest rate", head + 4, 4, 0xFFFFFFFF, _UNREADABLE),
        ("a rate of a million", head + 4, 4, 1_000_000, "AUDIO_FORMAT"),
        ("no bits", head + 14, 2, 0, _UNREADABLE),
        ("an unknown codec", head, 2, 0x7FFE, _UNREADABLE),
        ("more data than there is", data, 4, len(whole), _UNREADABLE),
        ("data of unknown length", data, 4, 0xFFFFFFFF, ""),
    ):
        yield f"wav, {name}", (said(at, size, value), reason)


def _tracks() -> Iterator[tuple[str, Bad]]:
    """Videos whose own sound is damaged, none, or too much."""
    rng = np.random.default_rng(4)
    tune = sounds.tune(1.5, 6)
    for kind in ("mp4", "matroska", "avi"):
        whole = sounds.film(tune, kind)
        for share in (0.3, 0.9):
            yield f"{kind}, {share:.0%} of it", (whole[: int(share * len(whole))], _UNREADABLE)
        for name, what in (("zeros", bytes), ("noise", rng.bytes)):
            heard = "" if sounds.FILMS[kind][-1] == "pcm_s16le" else _UNREADABLE  # whose samples may be any bytes
            yield f"{kind}, {name} in its track", (_overwritten(whole, what), heard)
    yield "no track", (pictures.video(pictures.frames(4, 64, 64)), "")
    whole = sounds.film(tune, "matroska")
    yield "a track of an unknown codec", (whole.replace(b"A_PCM", b"A_ZZZ"), _UNREADABLE)
    yield "a track without a packet", (sounds.film(tune[:0], "matroska"), _UNREADABLE)
    yield "a track that is too long", (sounds.film(np.zeros(16_000 * 6, np.int16), "matroska"), "AUDIO_TOO_LONG")
    yield "a track of a sample", (sounds.film(tune[:1], "matroska"), "AUDIO_TOO_SHORT")


def _overwritten(whole: bytes, what: Callable[[int], bytes]) -> bytes:
    """A video whose sound's packets, and nothing else, are other bytes."""
    import av

    data = bytearray(whole)
    with av.open(io.BytesIO(whole)) as file:
        for packet in file.demux(audio=0):
            if packet.size and packet.pos is not None:
                assert data[packet.pos : packet.pos + packet.size], "it lies in the file"
                at = whole.index(bytes(packet), packet.pos)
                data[at : at + packet.size] = what(packet.size)
    assert data != whole, "there was no packet"
    return bytes(data)


BAD_TRACKS: dict[str, Bad] = dict(_tracks())
"""Videos that are shown with their sound, of at most five seconds."""

BAD: dict[str, Bad] = dict(_made())
