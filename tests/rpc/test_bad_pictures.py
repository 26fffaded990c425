"""Bad pictures, over real gRPC: the status, the reason, and a service that goes on as before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests import bad_files, pictures
from tests.rpc.encoder_client import DECODER, image
from tests.rpc.refusals import Bad, good


def bad(data: Callable[[], bytes], reason: str, at: str = "") -> Bad:
    return Bad(lambda: image(data()), reason, at)


def cut(kind: str, **settings: object) -> Callable[[], bytes]:
    """A photograph's file, of which half is missing."""

    def make() -> bytes:
        whole = pictures.encoded(pictures.photograph(), kind, **settings)
        return whole[: len(whole) // 2]

    return make


def other(kind: str) -> Callable[[], bytes]:
    return lambda: pictures.encoded(pictures.noise(32, 32), kind)


FILES = {
    "empty": bad(lambda: b"", "MEDIA_EMPTY", "data"),
    "random": bad(lambda: np.random.default_rng(0).bytes(4096), "MEDIA_FORMAT"),
    "HTML": bad(lambda: b"<!DOCTYPE html><html><body>not here</body></html>", "MEDIA_FORMAT"),
    "SVG": bad(lambda: b'<svg xmlns="http://www.w3.org/2000/svg"/>', "MEDIA_FORMAT"),
    "a TIFF of fractions": bad(lambda: pictures.encoded(pictures.noise(32, 32).convert("F"), "TIFF"), "MEDIA_FORMAT"),
    "JP2": bad(other("JPEG2000"), "MEDIA_FORMAT"),
    "EPS": bad(other("EPS"), "MEDIA_FORMAT"),
    "ICO": bad(other("ICO"), "MEDIA_FORMAT"),
    "PSD": bad(lambda: b"8BPS\0\x01" + bytes(100), "MEDIA_FORMAT"),
    "a video": bad(lambda: pictures.video(pictures.frames(4)), "MEDIA_FORMAT"),
    "magic alone": bad(lambda: b"\xff\xd8\xff", "MEDIA_UNREADABLE"),
    "a random body": bad(lambda: b"\xff\xd8\xff" + np.random.default_rng(1).bytes(999), "MEDIA_UNREADABLE"),
    "half a JPEG": bad(cut("JPEG"), "MEDIA_UNREADABLE"),
    "half a JPEG with an end mark": bad(lambda: cut("JPEG")() + b"\xff\xd9", "MEDIA_UNREADABLE"),
    "half a progressive JPEG": bad(cut("JPEG", progressive=True), "MEDIA_UNREADABLE"),
    "half a PNG": bad(cut("PNG"), "MEDIA_UNREADABLE"),
    "half an AVIF": bad(cut("AVIF"), "MEDIA_UNREADABLE"),
    "half a WebP": bad(cut("WEBP"), "MEDIA_UNREADABLE"),
    "half a WebP without loss": bad(cut("WEBP", lossless=True), "MEDIA_UNREADABLE"),
    "half a GIF": bad(cut("GIF"), "MEDIA_UNREADABLE"),
    "half a TIFF": bad(cut("TIFF", compression="jpeg"), "MEDIA_UNREADABLE"),
    "half a BMP": bad(cut("BMP"), "MEDIA_UNREADABLE"),
    "a bad checksum": bad(bad_files.with_bad_checksum, "MEDIA_UNREADABLE"),
    "packed words": bad(lambda: bad_files.packed_words(b"zTXt", b"Comment\0\0"), "MEDIA_UNREADABLE"),
    "words without end": bad(
        lambda: bad_files.png(64, 64, extra=bad_files.chunk(b"tEXt", b"a\0b") * 40_000), "MEDIA_TOO_COMPLEX"
    ),
    "packed words in any language": bad(
        lambda: bad_files.packed_words(b"iTXt", b"Comment\0\1\0\0\0"), "MEDIA_UNREADABLE"
    ),
    "a packed colour profile": bad(lambda: bad_files.packed_words(b"iCCP", b"profile\0\0"), "MEDIA_UNREADABLE"),
}


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_picture_is_refused(strict, name):
    strict.refuses(FILES[name])


SIZES = {
    "0 by 0": bad(lambda: bad_files.png(0, 0), "MEDIA_UNREADABLE"),
    "1 by 1": bad(lambda: pictures.encoded(pictures.noise(1, 1)), "IMAGE_TOO_SMALL"),
    "1 by 10000": bad(lambda: pictures.encoded(pictures.noise(1, 10000)), "IMAGE_TOO_SMALL"),
    "4 by 1000": bad(lambda: pictures.encoded(pictures.noise(4, 1000)), "IMAGE_RATIO"),
    **{
        f"{name} of {side} by {side}": bad(lambda make=make, side=side: make(side, side), "IMAGE_TOO_LARGE")
        for name, make in bad_files.BOMBS.items()
        for side in ((16000,) if name == "WebP" else (16000, 50000))
    },
    "a frame larger than its GIF": bad(lambda: bad_files.gif(1, 1, frame=(30000, 30000)), "IMAGE_TOO_LARGE"),
    "88 MP in 10 KB": bad(lambda: pictures.encoded(Image.new("1", (11000, 8000))), "IMAGE_TOO_LARGE"),
    "21 MiB": bad(lambda: b"\xff\xd8\xff" + bytes(21 << 20), "IMAGE_TOO_LARGE"),
}


@pytest.mark.parametrize("name", SIZES)
def test_what_is_too_large_or_too_small_is_refused(strict, name):
    strict.refuses(SIZES[name])


def test_bombs_cost_no_memory(strict):
    """Decoded, the smallest of them would be 700 MB."""
    (pid,) = strict.service.children(DECODER)
    strict.still_right()
    before = _peak(pid)
    for name, make in bad_files.BOMBS.items():
        assert strict.client.one(image(make(16000, 16000))).error.reason == "IMAGE_TOO_LARGE", name
    assert strict.service.children(DECODER) == [pid]
    assert _peak(pid) - before < 100 << 20


def _peak(pid: int) -> int:
    """The most memory that a process has had so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


MIME = {
    "of another picture": Bad(lambda: good(mime_type="image/jpeg"), "MIME_MISMATCH", "mime_type"),
    "of no picture": Bad(lambda: good(mime_type="text/html"), "MIME_MISMATCH", "mime_type"),
    "of a video": Bad(lambda: good(mime_type="video/mp4"), "MIME_MISMATCH", "mime_type"),
}


@pytest.mark.parametrize("name", MIME)
def test_a_type_that_the_bytes_contradict_is_refused(strict, name):
    strict.refuses(MIME[name])


def test_a_bad_item_leaves_its_neighbours_alone(strict):
    fine = good().data
    first, broken, last = strict.client.encode(image(fine), image(b"junk"), image(fine))
    assert (broken.error.reason, broken.error.field) == ("MEDIA_FORMAT", "items[1]")
    assert np.array_equal(first.rows, last.rows)
