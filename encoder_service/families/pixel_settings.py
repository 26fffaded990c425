"""How decoded pixels become patches, as a checkpoint's processors say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.checkpoints.checkpoint import CheckpointError
from common.media.item import Grid, Options
from encoder_service.families.resizing import bounds

_BICUBIC = 3


@dataclass(frozen=True, slots=True)
class PixelSettings:
    """How decoded pixels become patches. Bounds are areas in pixels; mean and std are of values in [0, 1]."""

    min_pixels: int
    max_pixels: int
    patch: int
    temporal: int
    merge: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale: float

    @property
    def factor(self) -> int:
        """Sides are multiples of this: a patch times a merge."""
        return self.patch * self.merge

    def bounds(self, options: Options) -> tuple[int, int]:
        """The bounds of the area, given a caller's options."""
        return bounds(self.min_pixels, self.max_pixels, options)

    def grid(self, groups: int, resized: tuple[int, int]) -> Grid:
        """The grid of so many frame groups."""
        return Grid(groups, resized[0] // self.patch, resized[1] // self.patch)

    def rows(self, grid: Grid) -> int:
        """Rows of a grid; 0 if it does not divide into squares."""
        return 0 if grid.h % self.merge or grid.w % self.merge else grid.patches // self.merge**2


def check_steps(given: Mapping[str, Any]) -> None:
    """Raises CheckpointError for the settings of a processor that leaves a step out, or resizes otherwise."""
    for step in ("do_resize", "do_rescale", "do_normalize"):
        if given.get(step, True) is not True:
            raise CheckpointError(f"a processor with {step} off is not supported")
    if given.get("resample", _BICUBIC) != _BICUBIC:
        raise CheckpointError("only bicubic resizing is supported")
