"""A picture that ends whoever computes it, in encoders that are run as the two modules beside this one."""

from __future__ import annotations

from PIL import Image

from tests import pictures

PICTURE = pictures.encoded(Image.new("RGB", (64, 64)))
"""All black, as no other picture of the tests is."""
