"""The pictures and questions that every engine is given."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

QUESTION = "What is in the picture, and what stands beside it?"
CONCURRENT = (1, 4, 8, 16)
"""Answers at once, where rates are measured."""
OTHER_QUESTION = "Which colours are there?"


def photograph(number: int, side: int = 448) -> Image.Image:
    """A real photograph, cut differently for each number, so that no two have the same content."""
    import skimage.data

    whole = Image.fromarray(skimage.data.astronaut())
    left, top = (number * 7) % 60, (number * 13) % 60
    cut = whole.crop((left, top, left + 450, top + 450)).resize((side, side), Image.Resampling.LANCZOS)
    pixels = np.asarray(cut).copy()
    pixels[:4, :4] = number % 251  # no cut comes back the same, however many are asked for
    return Image.fromarray(pixels)


def jpeg(image: Image.Image) -> bytes:
    """The picture as a JPEG file."""
    out = io.BytesIO()
    image.save(out, "JPEG", quality=92)
    return out.getvalue()
