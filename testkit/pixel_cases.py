"""What makes patches of pictures by kernels against what makes them by torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from encoder_service.families.internvl import PictureTiles, TileSettings
from encoder_service.families.pixel_settings import PixelSettings
from encoder_service.families.qwen_processors import ImageProcessor
from encoder_service.worker import fixed_point, patches, pixel_kernels, tiles
from encoder_service.worker.patches import PatchWriter

TYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (
    ((1, 30, 40), (20, 24)),
    ((2, 7, 9), (40, 50)),
    ((3, 13, 300), (13, 100)),
    ((1, 97, 33), (7, 33)),
    ((1, 1, 5), (4, 8)),
    ((1, 50, 3), (8, 1)),
    ((1, 4, 1), (9, 7)),
    ((1, 9, 400), (5, 350)),
)
"""Frames, their height and width; what these become."""
PATCHES = ((14, 2, 1), (14, 2, 6), (16, 2, 1), (16, 2, 4), (14, 1, 3))
"""Pixels on a side, frames of a patch, and frames."""
TILES = ((1, 1), (2, 3))
"""Rows and columns of tiles."""


def settings(patch: int, temporal: int) -> PixelSettings:
    return PixelSettings(1, 1 << 30, patch, temporal, 2, (0.481, 0.458, 0.408), (0.269, 0.261, 0.276), 1 / 255)


def noise(*shape: int, device: str) -> Tensor:
    """With both ends of what there is, which overshoots where it is resized."""
    drawn = torch.randint(-128, 384, (*shape, 3), generator=torch.Generator().manual_seed(sum(shape)))
    return drawn.clamp(0, 255).to(device, torch.uint8)


def check_resize(shape: tuple[int, int, int], size: tuple[int, int], device: str) -> None:
    frames = noise(*shape, device=device)
    expected = fixed_point.resize(frames.permute(0, 3, 1, 2).contiguous(), size)
    assert torch.equal(pixel_kernels.resize(frames, size).permute(0, 3, 1, 2), expected)


def check_patches(patch: int, temporal: int, frames: int, dtype: torch.dtype, device: str) -> None:
    """Of frames that are higher than they become, and less wide."""
    processor, size = ImageProcessor(settings(patch, temporal)), (4 * patch, 6 * patch)
    _check(patches.preprocess, processor, noise(frames, 5 * patch + 1, 5 * patch, device=device), size, dtype)


def check_tiles(down: int, across: int, dtype: torch.dtype, device: str) -> None:
    processor = PictureTiles(TileSettings(56, settings(14, 1)))
    pixels = noise(1, 60 * down + 1, 50 * across, device=device)
    _check(tiles.preprocess, processor, pixels, (56 * down, 56 * across), dtype)


def _check(
    preprocess: patches.PicturePatches,
    processor: ImageProcessor | PictureTiles,
    pixels: Tensor,
    size: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    """Into a part of a batch, beside which nothing is changed. What torch computes is resized as on a GPU."""
    frames = pixels.permute(0, 3, 1, 2).contiguous()
    pixel, cuts = preprocess.cuts(size, processor)
    parts = [patches.cut(fixed_point.resize(frames, each.size), each.tile) for each in cuts]
    expected = patches.patchify(patches.normalise(torch.cat(parts), pixel), pixel).to(dtype)
    batch = torch.full((len(expected) + 2, expected.shape[1]), 7.0, dtype=dtype, device=pixels.device)
    writer = PatchWriter(pixel_kernels, preprocess.cuts, processor)
    assert writer.numbers == batch.shape[1]
    writer.write(pixels, size, batch[1:-1])
    assert torch.equal(batch[1:-1], expected)
    assert bool((batch[[0, -1]] == 7.0).all())
