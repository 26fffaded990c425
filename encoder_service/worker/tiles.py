"""From decoded pixels to patches of square tiles, on the worker's device, equal to the reference's processors."""

from __future__ import annotations

from encoder_service.families.internvl import FrameTiles, PictureTiles
from encoder_service.families.pixel_settings import PixelSettings
from encoder_service.worker.patches import Cut, PicturePatches


def _tiles(size: tuple[int, int], processor: PictureTiles | FrameTiles) -> tuple[PixelSettings, list[Cut]]:
    """A picture that is cut into several tiles is followed by the patches of its thumbnail, one tile."""
    tile = processor.tiles.side, processor.tiles.side
    copy = [Cut(tile, tile)] if processor.has_copy and size != tile else []
    return processor.tiles.pixels, [Cut(size, tile), *copy]


preprocess = PicturePatches(_tiles)
"""That of tiles: each frame is resized, and cut."""
