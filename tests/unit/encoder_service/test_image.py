"""Pictures in the decode process: what is looked at before anything is decoded, and what is shown."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from encoder_service.item import Inspection
from encoder_service.media import image
from encoder_service.media.limits import MediaLimits
from tests import pictures

BOUNDS = MediaLimits(max_image_area=1 << 24).bounds


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def test_dimensions_are_known_without_decoding_a_pixel():
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", 300, 200, 8, 2, 0, 0, 0))
    undecodable = b"\x89PNG\r\n\x1a\n" + header + _chunk(b"IDAT", b"not zlib") + _chunk(b"IEND", b"")
    assert image.inspect(undecodable, BOUNDS) == Inspection(300, 200)
    with pytest.raises(OSError, match=r"decod|zlib|broken"):
        image.decode(undecodable, np.empty((1, 200, 300, 3), np.uint8), BOUNDS)


@pytest.mark.parametrize(("width", "height"), [(60000, 50000), (4097, 4096)])
def test_dimensions_of_what_is_too_large_come_back_without_a_look_inside(width, height):
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    words = _chunk(b"IDAT", b"x") + _chunk(b"tEXt", b"Comment\0late")
    assert image.inspect(b"\x89PNG\r\n\x1a\n" + header + words, BOUNDS) == Inspection(width, height)


@pytest.mark.parametrize("late", [False, True])
def test_an_orientation_counts_wherever_a_png_has_it(late):
    exif = Image.Exif()
    exif[0x0112] = 6
    plain, turned = (pictures.encoded(pictures.noise(30, 20), "PNG", **words) for words in ({}, {"exif": exif}))
    chunk = turned[(at := turned.index(b"eXIf") - 4) : at + 12 + int.from_bytes(turned[at : at + 4], "big")]
    end = plain.index(b"IEND") - 4
    data = plain[:end] + chunk + plain[end:] if late else turned
    assert image.inspect(data, BOUNDS) == Inspection(20, 30)
    out = np.empty((1, 30, 20, 3), np.uint8)
    image.decode(data, out, BOUNDS)
    assert np.array_equal(out[0], np.rot90(np.asarray(pictures.noise(30, 20)), -1))


@pytest.mark.parametrize("orientation", range(1, 10))
def test_each_orientation_is_shown_as_the_library_shows_it(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = pictures.encoded(pictures.noise(30, 20), "PNG", exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    seen, out = image.inspect(data, BOUNDS), np.empty((1, *expected.shape), np.uint8)
    image.decode(data, out, BOUNDS)
    assert (seen.height, seen.width) == expected.shape[:2]
    assert np.array_equal(out[0], expected)


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize(
    ("tag", "kind"),
    [pytest.param(306, 11, id="a date that is a number"), pytest.param(282, 2, id="a resolution that is a word")],
)
def test_a_tag_that_cannot_be_written_again_does_not_keep_a_picture_from_being_shown_upright(name, tag, kind):
    orientation, other = struct.pack("<HHII", 0x0112, 3, 1, 6), struct.pack("<HHII", tag, kind, 1, 0x41)
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + orientation + other + bytes(4)
    data = pictures.encoded(pictures.noise(30, 20), name, exif=exif)
    with Image.open(io.BytesIO(data)) as plain:
        expected = np.rot90(np.asarray(plain.convert("RGB")), -1)
    assert image.inspect(data, BOUNDS) == Inspection(20, 30)
    out = np.empty((1, 30, 20, 3), np.uint8)
    image.decode(data, out, BOUNDS)
    assert np.array_equal(out[0], expected)


def test_a_picture_that_changes_its_size_is_refused():
    with pytest.raises(ValueError, match="size"):
        image.decode(pictures.encoded(pictures.noise(30, 20)), np.empty((1, 30, 20, 3), np.uint8), BOUNDS)


def test_the_upper_byte_of_16_bit_grey_is_shown():
    grey = np.linspace(0, 65535, 600).astype(np.uint16).reshape(20, 30)
    out = np.empty((1, 20, 30, 3), np.uint8)
    image.decode(pictures.encoded(Image.fromarray(grey)), out, BOUNDS)
    assert np.array_equal(out[0], np.repeat((grey >> 8).astype(np.uint8)[..., None], 3, axis=2))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_shows_white_behind_it(mode):
    """As black words on nothing do, whose hidden colour is black as well."""
    alpha = np.zeros((20, 30), np.uint8)
    alpha[5:15, 10:20] = 255
    black = Image.fromarray(np.dstack([np.zeros((20, 30, 3), np.uint8), alpha]))
    settings = {}
    if mode == "P":
        black, settings = Image.fromarray(np.where(alpha, 1, 0).astype(np.uint8), "P"), {"transparency": 0}
        black.putpalette([0, 0, 0] * 2)
    elif mode == "LA":
        black = black.convert("LA")
    out = np.empty((1, 20, 30, 3), np.uint8)
    image.decode(pictures.encoded(black, "PNG", **settings), out, BOUNDS)
    assert np.array_equal(out[0], np.repeat(255 - alpha[..., None], 3, axis=2))
