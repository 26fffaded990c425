"""Small files that would keep a decoder busy, and pictures of which a part is missing behind a proper end mark."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from encoder_service.media import chunks, image
from encoder_service.media.complexity import TooComplex
from encoder_service.media.limits import MediaLimits
from tests import bad_files, pictures
from tests.bad_files import chunk

BOUNDS = MediaLimits().bounds
END = b"\xff\xd9"


def shown(data: bytes, bounds=BOUNDS) -> np.ndarray:
    """The picture as a decode process shows it, [height, width, 3]."""
    seen = image.inspect(data, bounds)
    out = np.empty((1, seen.height, seen.width, 3), np.uint8)
    image.decode(data, out, bounds)
    return out[0]


def plainly(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def png(extra: bytes = b"") -> bytes:
    return bad_files.png(64, 64, zlib.compress(b"\0" * (64 * 193)), extra=extra)


def jpeg(**settings: object) -> bytes:
    return pictures.encoded(pictures.photograph("coffee").resize((120, 80)), "JPEG", **settings)


def gif(extension: bytes = b"") -> bytes:
    whole = pictures.encoded(pictures.noise(20, 10).quantize(16), "GIF")
    at = whole.index(b"\x2c", 13 + 48)
    return whole[:at] + extension + whole[at:]


def packed_bmp(runs: int) -> bytes:
    head = struct.pack("<IiiHHIIiiII", 40, 300, 200, 1, 8, 1, 2 * runs, 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 54 + 1024 + 2 * runs, 0, 0, 54 + 1024) + head + bytes(1024) + b"\x01\x05" * runs


def with_scans(count: int) -> bytes:
    """A progressive JPEG that says `count` times more that there is nothing to add."""
    return jpeg(progressive=True)[:-2] + b"\xff\xda\0\x08\x01\x01\0\x01\x3f\0" * count + END


PROFILE = chunk(b"iCCP", b"profile\0\0" + zlib.compress(bytes(1 << 20), 9))
CROWDED: dict[str, Callable[[], bytes]] = {
    "words": lambda: png(b"".join(chunk(b"tEXt", b"%d\0v" % number) for number in range(300_000))),
    "empty chunks": lambda: png(chunk(b"prVt", b"") * 1_500_000),
    "empty chunks of pixels": lambda: png(chunk(b"IDAT", b"") * 1_500_000),
    "packed profiles": lambda: png(PROFILE * 1000),
    "packed words without a name": lambda: png(chunk(b"zTXt", b"\0\0" + zlib.compress(bytes(1 << 20), 9)) * 1000),
    "empty scans": lambda: with_scans(60_000),
    "empty segments": lambda: b"\xff\xd8" + b"\xff\xfe\0\2" * 1_000_000 + jpeg()[2:],
    "empty segments between scans": lambda: jpeg(progressive=True)[:-2] + b"\xff\xfe\0\2" * 1_000_000 + END,
    "bytes that fill up": lambda: b"\xff\xd8" + b"\xff" * 10_000_000 + jpeg()[2:],
    "bytes that are skipped": lambda: b"\xff\xd8" + b"\xff\0" * 1_000_000 + jpeg()[2:],
    "sub-blocks": lambda: gif(b"\x21\xfe" + b"\1a" * 1_000_000 + b"\0"),
    "extensions": lambda: gif(b"\x21\xf9\4\0\0\0\0\0" * 1_000_000),
    "nothing at all": lambda: gif(bytes(1_000_000)),
    "runs": lambda: packed_bmp(3 << 20),
    "tags": lambda: bad_files.tiff({tag: (3, [1]) for tag in range(256, 60_000)}),
    "strips": lambda: bad_files.tiff({256: (3, [9]), 257: (3, [9]), 262: (3, [1]), 273: (4, [8] * 1_000_000)}),
}


@pytest.mark.parametrize("name", CROWDED)
def test_no_decoder_sees_a_file_of_too_many_parts(name, monkeypatch):
    data = CROWDED[name]()
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("the decoder was asked"))
    with pytest.raises(TooComplex):
        image.inspect(data, BOUNDS)


ORDINARY: dict[str, Callable[[], bytes]] = {
    "a PNG": lambda: png(chunk(b"tEXt", b"a\0b") * 50 + chunk(b"zTXt", b"a\0\0" + zlib.compress(b"b")) * 9 + PROFILE),
    "a JPEG": jpeg,
    "a progressive JPEG": lambda: jpeg(progressive=True),
    "a GIF": lambda: gif(b"\x21\xfe\5hello\5world\0"),
    "a WebP": lambda: pictures.encoded(pictures.noise(20, 10), "WEBP", lossless=True),
    "a BMP": lambda: pictures.encoded(pictures.noise(20, 10), "BMP"),
    "a TIFF": lambda: pictures.encoded(pictures.noise(20, 10), "TIFF", compression="tiff_lzw"),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_picture_is_far_from_the_limits(name):
    few = MediaLimits(max_image_chunks=4000, max_image_scans=10, max_packed_bmp_bytes=1).bounds
    data = ORDINARY[name]()
    assert np.array_equal(shown(data, few), plainly(data))


def test_each_limit_counts_what_it_says():
    of_png = png(chunk(b"tEXt", b"a\0b") * 61)  # and three more
    chunks.check(of_png, "PNG", MediaLimits(max_image_chunks=64).bounds)
    with pytest.raises(TooComplex):
        chunks.check(png(chunk(b"tEXt", b"a\0b") * 62), "PNG", MediaLimits(max_image_chunks=64).bounds)
    scans = jpeg(progressive=True).count(b"\xff\xda")
    chunks.check(with_scans(5), "JPEG", MediaLimits(max_image_scans=scans + 5).bounds)
    with pytest.raises(TooComplex):
        chunks.check(with_scans(6), "JPEG", MediaLimits(max_image_scans=scans + 5).bounds)
    chunks.check(gif(b"\x21\xfe" + b"\1a" * 63 + b"\0"), "GIF", MediaLimits(max_image_chunks=64).bounds)
    with pytest.raises(TooComplex):
        chunks.check(gif(b"\x21\xfe" + b"\1a" * 64 + b"\0"), "GIF", MediaLimits(max_image_chunks=64).bounds)
    chunks.check(packed_bmp(100), "BMP", MediaLimits(max_packed_bmp_bytes=200).bounds)
    with pytest.raises(TooComplex):
        chunks.check(packed_bmp(101), "BMP", MediaLimits(max_packed_bmp_bytes=200).bounds)


JPEGS: dict[str, dict[str, object]] = {
    "plain": {},
    "of full colour": {"subsampling": 0, "quality": 95},
    "with few colours": {"subsampling": 2, "quality": 20},
    "with marks to begin again": {"restart_marker_blocks": 3},
    "progressive": {"progressive": True},
    "progressive of full colour": {"progressive": True, "subsampling": 0, "quality": 95},
}


def sources() -> list[Image.Image]:
    photograph = pictures.photograph("coffee").resize((163, 101))
    return [photograph, photograph.convert("L"), photograph.convert("CMYK"), Image.new("RGB", (90, 70), (128,) * 3)]


@pytest.mark.parametrize("name", JPEGS)
def test_a_whole_jpeg_is_shown_whatever_follows_its_picture(name):
    for source in sources():
        data = pictures.encoded(source, "JPEG", **JPEGS[name])
        expected, body = plainly(data), data[:-2]
        for end in (END, END + b"junk\xff\xd8\xff\xda" * 20, bytes(30) + END, b"\xff" * 5 + END, END + data):
            assert np.array_equal(shown(body + end), expected)


@pytest.mark.parametrize("name", JPEGS)
def test_a_jpeg_that_lacks_a_part_is_refused_though_it_ends_properly(name):
    """The library shows grey in the place of what is missing."""
    for source in sources()[:3]:
        data = pictures.encoded(source, "JPEG", **JPEGS[name])
        start = data.index(b"\xff\xda") + 20
        for cut in (*range(start, len(data) - 40, (len(data) - start) // 23), len(data) // 2):
            with pytest.raises((ValueError, OSError)):
                shown(data[:cut] + END)


def test_a_jpeg_that_lost_its_last_scans_is_refused():
    data = jpeg(progressive=True)
    for at in range(len(data)):
        if data.startswith(b"\xff\xda", at) and at > data.index(b"\xff\xda"):
            with pytest.raises(ValueError, match="no scan"):
                shown(data[:at] + END)


def test_two_pictures_in_one_jpeg_are_the_first_one():
    first, second = (pictures.noise(40, 30, seed) for seed in (1, 2))
    file = io.BytesIO()
    first.save(file, "MPO", save_all=True, append_images=[second])
    assert np.array_equal(shown(file.getvalue()), plainly(file.getvalue()))


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP", "BMP"])
def test_half_of_any_other_picture_is_refused_though_it_ends_properly(kind):
    photograph = pictures.photograph("coffee").resize((120, 80))
    whole = pictures.encoded(photograph.quantize(64) if kind == "GIF" else photograph, kind)
    half = whole[: len(whole) // 2]
    if kind == "PNG":
        at = whole.index(b"IDAT")
        half = whole[: at - 4] + chunk(b"IDAT", half[at + 4 :]) + chunk(b"IEND", b"")
    elif kind == "GIF":
        at = 13 + 3 * 64 + whole[13 + 3 * 64 :].index(b"\x2c") + 11
        while (following := at + 1 + whole[at]) < len(half):
            at = following
        half = whole[:at] + b"\0;"
    elif kind == "WEBP":
        body = half[20:] + bytes(len(half) % 2)
        half = b"RIFF" + struct.pack("<I", 12 + len(body)) + whole[8:16] + struct.pack("<I", len(body)) + body
    with pytest.raises((ValueError, OSError, SyntaxError)):
        shown(half)
