"""Small files that say to be huge, of every format: their size is told before anything is decoded."""

from __future__ import annotations

from unittest import mock

import pytest
from PIL import Image, ImageFile

from encoder_service.item import Inspection
from encoder_service.media import image
from encoder_service.media.limits import MediaLimits
from tests import bad_files, pictures

BOUNDS = MediaLimits(max_image_area=1 << 24).bounds


def inspected(data: bytes) -> Inspection:
    """What a picture's header says; fails where pixels are decoded to learn it."""
    decoded = AssertionError("pixels are decoded")
    Image.init()  # some of the library's modules make pictures of their own when they are loaded
    with (
        mock.patch.object(Image.Image, "load", side_effect=decoded),
        mock.patch.object(ImageFile.ImageFile, "load", side_effect=decoded),
    ):
        return image.inspect(data, BOUNDS)


@pytest.mark.parametrize(("name", "make"), bad_files.BOMBS.items())
def test_a_size_is_read_and_nothing_is_decoded(name, make):
    width, height = (16000, 12000) if name in ("WebP", "GIF") else (50000, 40000)
    bomb = make(width, height)
    assert len(bomb) < 1000
    assert inspected(bomb) == Inspection(width, height)


def test_a_frame_larger_than_the_screen_of_its_gif_counts():
    assert inspected(bad_files.gif(1, 1, frame=(30000, 20000))) == Inspection(30000, 20000)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_no_frame_is_decoded_to_know_its_size(kind):
    frames = [pictures.noise(40, 30, seed) for seed in range(5)]
    assert inspected(pictures.encoded(frames[0], kind, save_all=True, append_images=frames[1:])) == Inspection(40, 30)
