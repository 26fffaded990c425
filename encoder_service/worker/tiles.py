"""From decoded pixels to patches of square tiles, on the worker's device, equal to the reference's processors."""

from __future__ import annotations

import torch
from torch import Tensor

from encoder_service.families.internvl import FrameTiles, PictureTiles
from encoder_service.worker.patches import normalise, patchify, resize


def preprocess(pixels: Tensor, size: tuple[int, int], processor: PictureTiles | FrameTiles) -> Tensor:
    """The `Preprocess` of tiles: patches [tiles · h · w, dim] float32 of frames [T, H, W, 3] uint8, each resized to
    `size` and cut; behind a picture that is cut into several, those of all of it as one tile."""
    side, settings = processor.tiles.side, processor.tiles.pixels
    frames = pixels.permute(0, 3, 1, 2).contiguous()
    tiles = cut(resize(frames, size), side)
    if processor.has_copy and len(tiles) > 1:
        tiles = torch.cat([tiles, resize(frames, (side, side))])
    return patchify(normalise(tiles, settings), settings)


def cut(frames: Tensor, side: int) -> Tensor:
    """Cuts [T, 3, H, W] into tiles [n, 3, side, side], row by row, one frame after the other."""
    t, _, height, width = frames.shape
    squares = frames.view(t, 3, height // side, side, width // side, side)
    return squares.permute(0, 2, 4, 1, 3, 5).reshape(-1, 3, side, side)
