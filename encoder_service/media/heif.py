"""HEIF pictures in the decode process, by pillow-heif, if it is installed."""

from __future__ import annotations

import importlib


def register() -> None:
    """Has Pillow read them by one thread, without the smaller and further pictures that a file may hold."""
    library = importlib.import_module("pillow_heif")
    library.options.DECODE_THREADS = 1
    for beside in ("THUMBNAILS", "AUX_IMAGES", "DEPTH_IMAGES"):
        setattr(library.options, beside, False)
    library.register_heif_opener()
