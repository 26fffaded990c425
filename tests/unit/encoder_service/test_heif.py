"""Pictures in HEIF, where pillow-heif is installed: shown as its files say, and refused where they are broken."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("pillow_heif")

from encoder_service.item import Inspection
from encoder_service.media import image
from encoder_service.media.__main__ import _UNREADABLE
from encoder_service.media.limits import MediaLimits
from encoder_service.media.sniff import IMAGES, check
from tests import pictures

BOUNDS = MediaLimits().bounds
WIDTH, HEIGHT = 120, 80


@pytest.fixture(autouse=True, scope="module")
def prepared() -> None:
    image.ImageFile.prepare()


def encoded(**settings: object) -> bytes:
    return pictures.encoded(pictures.photograph("coffee").resize((WIDTH, HEIGHT)), "HEIF", **settings)


def shown(data: bytes) -> np.ndarray:
    """The picture as a decode process shows it, [height, width, 3]."""
    seen = image.inspect(data, BOUNDS)
    out = np.empty((1, seen.height, seen.width, 3), np.uint8)
    image.decode(data, out, BOUNDS)
    return out[0]


def test_it_is_told_by_its_first_bytes() -> None:
    check(encoded(), IMAGES, "image", "image/heic", "items[0].data")


@pytest.mark.parametrize("orientation", range(1, 9))
def test_it_is_shown_upright(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(exif=exif.tobytes())  # the library writes it as a turn of the file's own
    with Image.open(io.BytesIO(data)) as opened:
        expected = np.asarray(opened.convert("RGB"))
    sides = (HEIGHT, WIDTH) if orientation > 4 else (WIDTH, HEIGHT)
    assert image.inspect(data, BOUNDS) == Inspection(*sides)
    assert np.array_equal(shown(data), expected)
    turned = pictures.photograph("coffee").resize((WIDTH, HEIGHT))
    if (method := image._TO_UPRIGHT.get(orientation)) is not None:
        turned = turned.transpose(method)
    off = np.abs(np.asarray(turned, np.float32) - expected)
    assert off.mean() < 8, "not turned, or turned twice"


def test_where_pixels_are_missing_nothing_is_shown() -> None:
    data = encoded()
    for end in (40, len(data) // 2, len(data) - 40):
        with pytest.raises(_UNREADABLE):
            shown(data[:end])


def test_whatever_bytes_change_a_file_is_shown_or_refused() -> None:
    random, whole, ends = np.random.default_rng(7), encoded(), set[str]()
    for _ in range(300):
        spoilt = bytearray(whole)
        for _ in range(random.integers(1, 4)):
            spoilt[random.integers(12, 700 if random.random() < 0.6 else len(spoilt))] = random.integers(256)
        try:
            shown(bytes(spoilt))
            ends.add("shown")
        except _UNREADABLE:
            ends.add("refused")
    assert ends == {"shown", "refused"}
