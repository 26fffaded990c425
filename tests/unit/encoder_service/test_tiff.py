"""TIFF files: the first page is shown as the library shows it, and nothing but what says where its pixels are, and how,
reaches the library."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

from encoder_service.item import Inspection
from encoder_service.media import image, tiff
from encoder_service.media.__main__ import _UNREADABLE
from encoder_service.media.complexity import TooComplex, UnusualKind
from encoder_service.media.limits import MediaLimits
from tests import bad_files, pictures

BOUNDS = MediaLimits().bounds
PACKINGS = ("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg")
WIDTH, HEIGHT = 60, 40


def drawn(mode: str = "RGB") -> Image.Image:
    return pictures.photograph("coffee").resize((WIDTH, HEIGHT)).convert(mode)


def shown(data: bytes) -> np.ndarray:
    """The picture as a decode process shows it, [height, width, 3]."""
    seen = image.inspect(data, BOUNDS)
    out = np.empty((1, seen.height, seen.width, 3), np.uint8)
    image.decode(data, out, BOUNDS)
    return out[0]


def plainly(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as picture:
        picture.load()
        return np.asarray(picture.convert("RGB"))


def grey(values: np.ndarray, colours: int, order: str = "<") -> bytes:
    """16 bits of grey, [height, width], by one strip."""
    one = {256: WIDTH, 257: HEIGHT, 258: 16, 259: 1, 262: colours, 273: 8, 277: 1, 278: HEIGHT, 279: 2 * values.size}
    return bad_files.tiff(
        {tag: (4 if tag in (273, 279) else 3, [value]) for tag, value in one.items()},
        values.astype(order + "u2").tobytes(),
        order=order,
    )


KINDS = [
    *itertools.product(("RGB", "L", "CMYK"), PACKINGS),
    *itertools.product(("P", "1"), PACKINGS[:4]),
    *itertools.product(("1",), ("group3", "group4", "tiff_ccitt")),
    ("YCbCr", "jpeg"),
]


@pytest.mark.parametrize(("mode", "packing"), KINDS)
def test_what_scanners_write_is_shown_as_the_library_shows_it(mode: str, packing: str) -> None:
    data = pictures.encoded(drawn(mode), "TIFF", compression=packing)
    assert np.array_equal(shown(data), plainly(data))


@pytest.mark.parametrize("packing", ["raw", "tiff_lzw"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_each_orientation_is_shown_upright(packing: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = pictures.encoded(drawn(), "TIFF", exif=exif, compression=packing)
    expected = plainly(data)
    assert image.inspect(data, BOUNDS) == Inspection(expected.shape[1], expected.shape[0])
    assert np.array_equal(shown(data), expected)


@pytest.mark.parametrize("order", ["<", ">"])
def test_the_upper_byte_of_16_bit_grey_is_shown(order: str) -> None:
    values = np.linspace(0, 65535, WIDTH * HEIGHT).astype(np.uint16).reshape(HEIGHT, WIDTH)
    assert np.array_equal(shown(grey(values, 1, order))[..., 0], values >> 8)


def test_where_zero_is_white_16_bit_grey_is_turned_round() -> None:
    values = np.linspace(0, 65535, WIDTH * HEIGHT).astype(np.uint16).reshape(HEIGHT, WIDTH)
    assert np.array_equal(shown(grey(values, 0))[..., 0], 255 - (values >> 8))


def test_of_several_pages_the_first_is_shown_and_the_others_are_not_read() -> None:
    pages = [drawn(), pictures.noise(30, 20), pictures.noise(20, 20)]
    data = pictures.encoded(pages[0], "TIFF", save_all=True, append_images=pages[1:])
    assert np.array_equal(shown(data), np.asarray(pages[0]))
    alone = tiff.first_page(data, BOUNDS).alone()
    with Image.open(io.BytesIO(alone)) as picture:
        assert isinstance(picture, TiffImagePlugin.TiffImageFile)
        assert picture.n_frames == 1


def test_the_library_sees_no_tag_that_no_pixel_needs() -> None:
    """A profile, words, private tags and resolutions; the orientation is ours to apply."""
    about = TiffImagePlugin.ImageFileDirectory_v2()
    about[270], about[282], about[65000], about[274] = "a title", 300.0, b"private", 6
    data = pictures.encoded(drawn(), "TIFF", tiffinfo=about, icc_profile=bytes(600))
    with Image.open(io.BytesIO(data)) as whole:
        assert isinstance(whole, TiffImagePlugin.TiffImageFile)
        assert {270, 274, 282, 34675, 65000} <= set(whole.tag_v2)
    with Image.open(io.BytesIO(tiff.first_page(data, BOUNDS).alone())) as picture:
        assert isinstance(picture, TiffImagePlugin.TiffImageFile)
        assert set(picture.tag_v2) <= tiff._KEPT
    assert np.array_equal(shown(data), np.rot90(np.asarray(drawn()), -1))


def changed(tag: int, value: int) -> bytes:
    """A small grey TIFF with another value of a tag, or one more."""
    one = {256: 2, 257: 1, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: 1, 279: 2, tag: value}
    return bad_files.tiff({each: (4, [number]) for each, number in one.items()})


UNSUPPORTED: dict[str, Callable[[], bytes]] = {
    "fractions": lambda: pictures.encoded(drawn("F"), "TIFF"),
    "whole numbers of 32 bits": lambda: pictures.encoded(drawn("I"), "TIFF"),
    "numbers with a sign": lambda: changed(339, 2),
    "LAB": lambda: pictures.encoded(drawn("LAB"), "TIFF"),
    "YCbCr that is not packed": lambda: pictures.encoded(drawn("YCbCr"), "TIFF"),
    "LZMA": lambda: pictures.encoded(drawn(), "TIFF", compression="lzma"),
    "the older JPEG": lambda: changed(259, 6),
    "a smaller picture before a camera's own": lambda: changed(254, 1),
    "3 bits": lambda: changed(258, 3),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_nothing_says_the_brightness_of_is_refused_as_such(name: str) -> None:
    with pytest.raises(UnusualKind):
        image.inspect(UNSUPPORTED[name](), BOUNDS)


BROKEN: dict[str, Callable[[], bytes]] = {
    "a strip is missing": lambda: changed(257, 2),
    "a strip ends behind the file": lambda: changed(279, 5000),
    "there are no strips": lambda: bad_files.tiff({256: (3, [2]), 257: (3, [1]), 258: (3, [8]), 262: (3, [1])}),
    "half of it": lambda: (data := pictures.encoded(drawn(), "TIFF", compression="jpeg"))[: len(data) // 2],
}


@pytest.mark.parametrize("name", BROKEN)
def test_where_pixels_are_missing_nothing_is_shown(name: str) -> None:
    data = BROKEN[name]()
    with pytest.raises(_UNREADABLE):
        shown(data)
    with pytest.raises(_UNREADABLE):
        image.decode(data, np.empty((1, 1, 2, 3), np.uint8), BOUNDS)


def test_strips_that_lie_over_each_other_cost_nothing() -> None:
    """Each would be unpacked from the same bytes again."""
    body, count = bytes(1000), 500
    one = {256: 2, 257: count, 258: 8, 259: 5, 262: 1, 277: 1, 278: 1}
    places = {273: (4, [8] * count), 279: (4, [len(body)] * count)}
    data = bad_files.tiff({**{tag: (3, [value]) for tag, value in one.items()}, **places}, body)
    assert image.inspect(data, BOUNDS) == Inspection(2, count)
    with pytest.raises(TooComplex):
        image.decode(data, np.empty((1, count, 2, 3), np.uint8), BOUNDS)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the library's, as in a decode process
def test_whatever_bytes_change_a_file_is_shown_or_refused() -> None:
    random, ends = np.random.default_rng(7), set[str]()
    whole = [pictures.encoded(drawn(mode), "TIFF", compression=packing) for mode, packing in KINDS]
    for _ in range(60):
        for data in whole:
            spoilt, tags = bytearray(data), int.from_bytes(data[4:8], "little")
            for _ in range(random.integers(1, 4)):
                first, end = (tags, min(len(data), tags + 160)) if random.random() < 0.6 else (0, len(data))
                spoilt[random.integers(first, end)] = random.integers(256)
            try:
                shown(bytes(spoilt))
                ends.add("shown")
            except _UNREADABLE as error:
                ends.add(type(error).__name__)
    assert {"shown", "UnusualKind", "TooComplex", "ValueError"} <= ends
