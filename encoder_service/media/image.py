"""Pictures in the decode process: Pillow, held to the formats that were named by their first bytes."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageOps

from encoder_service.item import Inspection
from encoder_service.media.sniff import image_format

Image.MAX_IMAGE_PIXELS = None  # dimensions are checked against our own limits before anything is decoded

_ORIENTATION = 0x0112
_SIDEWAYS = (5, 6, 7, 8)


def inspect(data: bytes) -> Inspection:
    """A picture's dimensions once its EXIF orientation is applied; no pixel is decoded."""
    with _open(data) as image:
        width, height = image.size
        if image.getexif().get(_ORIENTATION) in _SIDEWAYS:
            width, height = height, width
    return Inspection(width=width, height=height)


def decode(data: bytes, out: np.ndarray) -> None:
    """Writes the picture, upright and as RGB, into `out`, [1, height, width, 3] uint8.

    Of an animation the first frame is taken. Raises ValueError where the size is not the one that was
    announced.
    """
    if image_format(data[:512]) == "PNG":
        with _open(data) as image:
            image.verify()  # reading its pixels would not look at every checksum
    with _open(data) as image:
        upright = ImageOps.exif_transpose(image).convert("RGB")
    if (upright.height, upright.width) != out.shape[1:3]:
        raise ValueError("the picture's size changed while it was decoded")
    out[0] = np.asarray(upright)


def _open(data: bytes) -> Image.Image:
    name = image_format(data[:512])
    if name is None:
        raise ValueError("not a picture of a supported format")
    return Image.open(io.BytesIO(data), formats=[name])
