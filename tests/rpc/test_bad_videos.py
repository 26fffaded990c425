"""Bad videos, over real gRPC: refused in bounded time, and a service that goes on as before."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests import bad_files, pictures
from tests.rpc.encoder_client import video
from tests.rpc.refusals import INFINITY, NAN, Bad


def bad(data: Callable[[], bytes], reason: str, at: str = "", **options: object) -> Bad:
    return Bad(lambda: video(data(), **options), reason, at)


def fine() -> bytes:
    return pictures.video(pictures.frames(8))


def cut(data: Callable[[], bytes]) -> Callable[[], bytes]:
    return lambda: data()[: len(data()) // 2]


FILES = {
    "empty": bad(lambda: b"", "MEDIA_EMPTY", "data"),
    "a picture": bad(lambda: pictures.encoded(pictures.noise(40, 40), "GIF"), "MEDIA_FORMAT"),
    "a playlist": bad(lambda: b"#EXTM3U\nfile:///etc/passwd\n", "MEDIA_FORMAT"),
    "sound alone": bad(bad_files.sound_alone, "MEDIA_UNREADABLE"),
    "no index": bad(bad_files.without_index, "MEDIA_UNREADABLE"),
    "no frames": bad(lambda: bad_files.claims_frames(0), "MEDIA_UNREADABLE"),
    "a billion frames": bad(lambda: bad_files.claims_frames(10**9), "MEDIA_UNREADABLE"),
    "half of it, the index first": bad(cut(bad_files.index_first), "MEDIA_UNREADABLE"),
    "all but the last bytes": bad(lambda: fine()[:-64], "MEDIA_UNREADABLE"),
    "boxes without end": bad(lambda: fine() + b"\0\0\0\x08free" * 500_001, "MEDIA_TOO_COMPLEX"),
    "half a Matroska": bad(cut(lambda: pictures.video(pictures.frames(40), container="matroska")), "MEDIA_UNREADABLE"),
    "half an AVI": bad(cut(lambda: pictures.video(pictures.frames(40), container="avi")), "MEDIA_UNREADABLE"),
    "a head without a body": bad(lambda: pictures.video(pictures.frames(4), container="avi")[:20], "MEDIA_UNREADABLE"),
    "8K frames": bad(lambda: pictures.video(np.zeros((2, 4320, 7680, 3), np.uint8)), "IMAGE_TOO_LARGE"),
    "frames of a tick each": bad(lambda: bad_files.lies_about_time(1), "VIDEO_UNREADABLE"),
    "more frames to be kept than there may be": bad(
        lambda: pictures.video(pictures.frames(70), fps=2), "VIDEO_TOO_LONG"
    ),
    "65 MiB": bad(lambda: b"\0\0\0\x18ftyp" + bytes(65 << 20), "VIDEO_TOO_LARGE"),
}


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_video_is_refused(strict, name):
    strict.refuses(FILES[name])


OPTIONS = {
    "fps not a number": bad(fine, "BAD_OPTION", "options.fps", fps=NAN),
    "no fps": bad(fine, "BAD_OPTION", "options.fps", fps=0.0),
    "negative fps": bad(fine, "BAD_OPTION", "options.fps", fps=-1.0),
    "endless fps": bad(fine, "BAD_OPTION", "options.fps", fps=INFINITY),
    "endless negative fps": bad(fine, "BAD_OPTION", "options.fps", fps=-INFINITY),
    "too many fps": bad(fine, "BAD_OPTION", "options.fps", fps=1000.5),
    "no frames": bad(fine, "BAD_OPTION", "options.max_frames", max_frames=0),
    "negative frames": bad(fine, "BAD_OPTION", "options.max_frames", max_frames=-(2**31)),
    "too many frames": bad(fine, "BAD_OPTION", "options.max_frames", max_frames=65),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_make_no_sense_are_refused_by_name(strict, name):
    strict.refuses(OPTIONS[name])


@pytest.mark.parametrize("ticks", [0, 2**31 - 1, 2**32 - 1])
def test_a_video_that_lies_about_its_time_is_read_or_refused_but_nothing_breaks(strict, ticks):
    found = strict.client.one(video(bad_files.lies_about_time(ticks)))
    assert found.error is None or found.error.reason == "VIDEO_UNREADABLE"
    assert found.error is not None or np.isfinite([*found.header.timestamps, found.header.seconds_per_grid]).all()
    strict.still_right()
