"""From decoded pixels to patches, on the worker's device, equal to the reference's processors.

Pixels are resized as 8-bit values (antialiased bicubic), so that rounding happens where the reference rounds.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.telemetry import log
from encoder_service.families.pixel_settings import PixelSettings
from encoder_service.families.qwen_processors import ImageProcessor, VideoProcessor
from encoder_service.worker import fixed_point
from encoder_service.worker.pixel_ring import kept_there

_log = log.get("kernels")


def resize(frames: Tensor, size: tuple[int, int]) -> Tensor:
    """Resizes [T, 3, H, W] uint8 to `size` (height, width), antialiased bicubic; the result is uint8."""
    if tuple(frames.shape[-2:]) == size:
        return frames
    if frames.device.type == "cpu":  # here torch has a kernel for 8-bit values
        return F.interpolate(frames, size, mode="bicubic", align_corners=False, antialias=True)
    return fixed_point.resize(frames, size)


def normalise(frames: Tensor, settings: PixelSettings) -> Tensor:
    """Maps [T, 3, H, W] uint8 to float32: rescaling is folded into mean and deviation, as in the reference."""
    mean, deviation = scaled(settings, frames.device)
    return (frames.float() - mean).div_(deviation)


@functools.lru_cache(maxsize=16)
def scaled(settings: PixelSettings, device: torch.device) -> tuple[Tensor, Tensor]:
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


def cut(frames: Tensor, tile: tuple[int, int]) -> Tensor:
    """Cuts [T, 3, H, W] into tiles [n, 3, height, width], row by row, one frame after the other."""
    t, _, height, width = frames.shape
    squares = frames.view(t, 3, height // tile[0], tile[0], width // tile[1], tile[1])
    return squares.permute(0, 2, 4, 1, 3, 5).reshape(-1, 3, *tile)


Preprocess = Callable[[Tensor, tuple[int, int], Any], Tensor]
"""Patches [t·h·w, dim] float32 of decoded frames [T, H, W, 3] uint8, resized to (height, width); the last argument is
the processor that names the function (`families.family.Processor`)."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Frames resized to `size` (height, width), and cut into tiles of `tile`."""

    size: tuple[int, int]
    tile: tuple[int, int]


Cuts = Callable[[tuple[int, int], Any], tuple[PixelSettings, list[Cut]]]
"""How frames resized to a size (height, width) become patches, by a processor; all patches of a cut precede those of
the next."""


class PicturePatches:
    """The `Preprocess` of pictures and frames."""

    def __init__(self, cuts: Cuts) -> None:
        self.cuts = cuts

    def __call__(self, pixels: Tensor, size: tuple[int, int], processor: Any) -> Tensor:
        settings, cuts = self.cuts(size, processor)
        frames = pixels.permute(0, 3, 1, 2).contiguous()
        parts = [cut(resize(frames, each.size), each.tile) for each in cuts]
        return patchify(normalise(parts[0] if len(parts) == 1 else torch.cat(parts), settings), settings)

    def writer(self, processor: Any, dtype: torch.dtype, device: torch.device) -> PatchWriter | None:
        """Makes the same patches by kernels, in this type; None if there is no such kernel."""
        settings, _ = self.cuts((0, 0), processor)
        kernels = _kernels(settings, dtype, device)
        return None if kernels is None else PatchWriter(kernels, self.cuts, processor)


class PatchWriter:
    """Has kernels (`pixel_kernels`) write patches into their places in a batch."""

    def __init__(self, kernels: ModuleType, cuts: Cuts, processor: Any) -> None:
        self._kernels, self._cuts, self._processor = kernels, cuts, processor
        settings, _ = cuts((0, 0), processor)
        self.numbers = 3 * settings.temporal * settings.patch**2
        """In a patch."""

    def write(self, pixels: Tensor, size: tuple[int, int], out: Tensor) -> None:
        """Fills `out` [t·h·w, numbers] with the patches of decoded frames [T, H, W, 3] uint8, resized to `size`."""
        settings, cuts = self._cuts(size, self._processor)
        patch, groups = settings.patch, max(1, len(pixels) // settings.temporal)
        counts = [groups * each.size[0] * each.size[1] // patch**2 for each in cuts]
        made = values(settings, out.dtype, out.device)
        for each, part in zip(cuts, out.split(counts), strict=True):
            tile, frames = (each.tile[0] // patch, each.tile[1] // patch), self._kernels.resize(pixels, each.size)
            self._kernels.write_patches(frames, part, made, tile, patch, settings.temporal, settings.merge)


@functools.lru_cache(maxsize=16)
def values(settings: PixelSettings, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The value of each of 256 levels in each channel [3, 256], cached on the device."""
    numbers = torch.arange(256, dtype=torch.uint8, device=device)
    return normalise(numbers.expand(1, 3, 1, 256), settings).to(dtype).view(3, 256)


@functools.lru_cache(maxsize=16)
def _kernels(settings: PixelSettings, dtype: torch.dtype, device: torch.device) -> ModuleType | None:
    """Kernels that make patches of pictures; None if they do not run: Triton may be missing, or lack a compiler."""
    if device.type != "cuda":
        return None
    try:
        kernels = importlib.import_module("encoder_service.worker.pixel_kernels")
        try_out(kernels, settings, dtype, device)
    except Exception as error:  # noqa: BLE001 - whatever it fails with, torch computes the same
        _log.warning("the kernels of pictures do not run here", cause=str(error)[:500])
        return None
    return kernels


def try_out(kernels: ModuleType, settings: PixelSettings, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError if the kernels' patches differ from torch's, for noise that is made narrower and higher, and
    cut into tiles if no patch has several frames."""
    side = 2 * settings.factor
    tile = side if settings.temporal > 1 else settings.factor
    patches = PicturePatches(lambda size, _: (settings, [Cut(size, (tile, tile))]))
    pixels = torch.randint(0, 256, (settings.temporal, side - 3, 2 * side + 1, 3), dtype=torch.uint8, device=device)
    expected = patches(pixels, (side, side), None).to(dtype)
    PatchWriter(kernels, patches.cuts, None).write(pixels, (side, side), found := torch.empty_like(expected))
    if not torch.equal(found, expected):
        raise ValueError("they make other patches than torch")


def _whole(size: tuple[int, int], processor: ImageProcessor | VideoProcessor) -> tuple[PixelSettings, list[Cut]]:
    return processor.pixels, [Cut(size, size)]


preprocess = PicturePatches(_whole)
"""That of the Qwen families."""
