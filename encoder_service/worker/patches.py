"""From decoded pixels to patches, on the worker's device, equal to the reference's processors.

Pixels are resized as 8-bit values (antialiased bicubic), so that rounding happens where the reference rounds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from encoder_service.families.pixel_settings import PixelSettings
from encoder_service.families.qwen_processors import ImageProcessor, VideoProcessor
from encoder_service.worker import fixed_point
from encoder_service.worker.pixel_ring import kept_there


def resize(frames: Tensor, size: tuple[int, int]) -> Tensor:
    """Resizes [T, 3, H, W] uint8 to `size` (height, width), antialiased bicubic; the result is uint8."""
    if tuple(frames.shape[-2:]) == size:
        return frames
    if frames.device.type == "cpu":  # here torch has a kernel for 8-bit values
        return F.interpolate(frames, size, mode="bicubic", align_corners=False, antialias=True)
    return fixed_point.resize(frames, size)


def normalise(frames: Tensor, settings: PixelSettings) -> Tensor:
    """Maps [T, 3, H, W] uint8 to float32: rescaling is folded into mean and deviation, as in the reference."""
    mean, deviation = _scaled(settings, frames.device)
    return (frames.float() - mean).div_(deviation)


@functools.lru_cache(maxsize=16)
def _scaled(settings: PixelSettings, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and deviation of 8-bit values [3, 1, 1] float32, kept on the device."""
    mean, deviation = (torch.tensor(each) * (1.0 / settings.rescale) for each in (settings.mean, settings.std))
    return kept_there(mean[:, None, None], device), kept_there(deviation[:, None, None], device)


def patchify(frames: Tensor, settings: PixelSettings) -> Tensor:
    """Cuts [T, 3, H, W] into [t·h·w, 3 · temporal · patch²], each merge × merge square of patches together.

    T is a multiple of the temporal patch, or 1: a picture stands still for the length of one.
    """
    patch, merge, temporal = settings.patch, settings.merge, settings.temporal
    if len(frames) == 1:
        frames = frames.expand(temporal, -1, -1, -1)
    t, h, w = len(frames) // temporal, frames.shape[2] // patch, frames.shape[3] // patch
    cut = frames.reshape(t, temporal, 3, h // merge, merge, patch, w // merge, merge, patch)
    # [t, temporal, 3, h/m, m, p, w/m, m, p] → [t, h/m, w/m, m, m, 3, temporal, p, p]
    return cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, 3 * temporal * patch * patch)


def pixels_to_patches(pixels: Tensor, size: tuple[int, int], settings: PixelSettings) -> Tensor:
    """Patches [t·h·w, dim] float32 of decoded frames [T, H, W, 3] uint8, resized to `size` first."""
    frames = pixels.permute(0, 3, 1, 2).contiguous()
    return patchify(normalise(resize(frames, size), settings), settings)


Preprocess = Callable[[Tensor, tuple[int, int], Any], Tensor]
"""Patches [t·h·w, dim] float32 of decoded frames [T, H, W, 3] uint8, resized to (height, width); the last argument is
the processor that names the function (`families.family.Processor`)."""


def preprocess(pixels: Tensor, size: tuple[int, int], processor: ImageProcessor | VideoProcessor) -> Tensor:
    """The `Preprocess` of the Qwen families."""
    return pixels_to_patches(pixels, size, processor.pixels)
