"""InternVL: a picture is cut into square tiles, in the arrangement that suits its aspect ratio, followed by a thumbnail
of the whole; a video frame is one tile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Final

import numpy as np

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.errors import InvalidInput
from common.media.encoder_digest import INTERNVL_PARTS, INTERNVL_TEXTS
from common.media.item import Grid, Modality, Options, Pixels
from encoder_service.families.family import Family, Processor
from encoder_service.families.pixel_settings import PixelSettings, check_steps
from encoder_service.families.qwen2_vl import CLIP_MEAN, CLIP_STD
from encoder_service.item import Inspection, Plan

_PREPROCESS: Final = "encoder_service.worker.tiles:preprocess"
_MOST_TILES: Final = 512
"""That a caller's bounds may ask for: choosing among their arrangements takes time."""
_DEFAULT_SIDE, _DEFAULT_MOST = 384, 12
_MERGE: Final = 2


@dataclass(frozen=True, slots=True)
class TileSettings:
    """Tiles of `side` × `side` pixels, and how they become patches; the bounds in `pixels` apply to all tiles of a
    picture together, without the thumbnail."""

    side: int
    pixels: PixelSettings

    @property
    def patches(self) -> int:
        """On a side of a tile."""
        return self.side // self.pixels.patch

    def bounds(self, options: Options) -> tuple[int, int]:
        """The fewest and most tiles, given a caller's options; at least one."""
        area = self.side**2
        fewest, largest = self.pixels.bounds(options)
        least, most = -(-fewest // area), max(largest // area, 1)
        if least > most:  # no number of tiles is between a caller's bounds
            return (most, most) if options.max_pixels else (least, least)
        return least, most


@dataclass(frozen=True, slots=True)
class PictureTiles:
    """Pictures: resized to the arrangement of tiles whose aspect ratio is nearest to theirs. The grid has all tiles one
    below the other, row by row, and, if there are several, the thumbnail last."""

    tiles: TileSettings
    preprocess: str = _PREPROCESS
    has_copy: ClassVar[bool] = True

    @property
    def merge(self) -> int:
        return self.tiles.pixels.merge

    def rows(self, grid: Grid) -> int:
        """As `Processor.rows` has it."""
        side = self.tiles.patches
        return self.tiles.pixels.rows(grid) if grid.t == 1 and grid.w == side and grid.h % side == 0 else 0

    def plan(self, seen: Inspection, options: Options) -> Plan:
        """A 900 × 450 picture with tiles of 448 pixels becomes 896 × 448: two tiles and the copy, grid (1, 96, 32)."""
        least, most = self.tiles.bounds(options)
        if most > _MOST_TILES:
            name = "max_pixels" if options.max_pixels else "min_pixels"
            raise InvalidInput(f"{name} asks for more than {_MOST_TILES} tiles of the model's", reason="BAD_OPTION")
        columns, rows = arrangement(seen.width, seen.height, self.tiles.side, least, most)
        count = columns * rows + (self.has_copy and columns * rows > 1)
        grid = Grid(1, count * self.tiles.patches, self.tiles.patches)
        resized = (rows * self.tiles.side, columns * self.tiles.side)
        return Plan(grid, self.rows(grid), (0,), seen.height, seen.width, resized)

    def plan_pixels(self, given: Pixels, options: Options) -> Plan:
        """As for a file with these dimensions."""
        return self.plan(Inspection(given.width, given.height), options)


@dataclass(frozen=True, slots=True)
class FrameTiles:
    """Videos: each chosen frame is resized to one tile, whatever its aspect ratio, and is a frame group.

    If `sampled`, `count` frames of a file are taken or, if that is None, `fps` per second, from `shift` on (None: half
    a step), in equal steps; else all frames, unless a caller asks for fewer.
    """

    tiles: TileSettings
    sampled: bool
    count: int | None
    fps: float | None
    shift: float | None
    preprocess: str = _PREPROCESS
    has_copy: ClassVar[bool] = False

    @property
    def merge(self) -> int:
        return self.tiles.pixels.merge

    def rows(self, grid: Grid) -> int:
        """As `Processor.rows` has it."""
        side = self.tiles.patches
        return self.tiles.pixels.rows(grid) if (grid.h, grid.w) == (side, side) else 0

    def plan(self, seen: Inspection, options: Options) -> Plan:
        """Which frames are taken, and the time of each."""
        frames = self._sample(seen.frames, seen.fps, options)
        times = [frame / seen.fps for frame in frames]
        return self._plan(frames, times, seen.height, seen.width, seen.frames / seen.fps / len(frames), options)

    def plan_pixels(self, given: Pixels, options: Options) -> Plan:
        """All frames are kept. Frames without times are spaced by `fps`, or half a second apart."""
        fps = options.fps or self.fps or 2.0
        times = list(given.timestamps) or [frame / fps for frame in range(given.frames)]
        apart = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 1 / fps
        return self._plan(range(given.frames), times, given.height, given.width, apart, options)

    def _sample(self, total: int, rate: float, options: Options) -> list[int]:
        """4 of 20 frames are 2 7 12 17."""
        fps = options.fps or (self.fps if self.sampled and self.count is None else None)
        count = int(total / rate * fps) if fps else self.count if self.sampled and self.count else total
        count = max(min(count, options.max_frames or count, total), 1)
        if count == total and not (self.sampled or options.fps):
            return list(range(total))
        step = total / count
        shift = step / 2 if self.shift is None else self.shift
        steps = (shift + np.arange(math.ceil((total - shift) / step)) * step).astype(np.float32)  # as the reference's
        return [int(frame) for frame in steps if frame < total] or [total - 1]

    def _plan(
        self, frames: Sequence[int], times: Sequence[float], height: int, width: int, apart: float, options: Options
    ) -> Plan:
        for name in ("min_pixels", "max_pixels"):
            if getattr(options, name) is not None:
                raise InvalidInput(f"{name}: a frame is one tile of this model, of one size", reason="BAD_OPTION")
        side = self.tiles.patches
        grid = Grid(len(frames), side, side)
        resized = (self.tiles.side, self.tiles.side)
        return Plan(
            grid=grid,
            tokens=self.rows(grid),
            frames=tuple(frames),
            height=height,
            width=width,
            resized=resized,
            timestamps=tuple(times),
            seconds_per_grid=apart,
        )


def arrangement(width: int, height: int, side: int, least: int, most: int) -> tuple[int, int]:
    """The (columns, rows) of `least` to `most` tiles of `side` × `side` pixels whose aspect ratio is nearest to a
    picture's.

    Of equally near ones, the one with the most tiles of which the picture fills more than half.
    """
    best, apart = (1, 1), math.inf
    for columns, rows in arrangements(least, most):
        off = abs(width / height - columns / rows)
        if off < apart or (off == apart and width * height > 0.5 * side * side * columns * rows):
            best, apart = (columns, rows), off
    return best


@lru_cache(maxsize=16)
def arrangements(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """All (columns, rows) of `least` to `most` tiles, those of fewer tiles first.

    >>> arrangements(2, 4)
    ((1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1))
    """
    found = [
        (columns, rows)
        for columns in range(1, most + 1)
        for rows in range(1, most // columns + 1)
        if columns * rows >= least
    ]
    return tuple(sorted(found, key=math.prod))


_TOWER: Final[dict[str, Any]] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "attention_bias": False,
    "use_qk_norm": False,
    "intermediate_size": 4096,
    "hidden_act": "gelu",
    "norm_type": "layer_norm",
    "layer_norm_eps": 1e-6,
    "image_size": 448,
    "patch_size": 14,
    "num_channels": 3,
    "use_mask_token": False,
    "use_absolute_position_embeddings": True,
    "use_mean_pooling": True,
}
"""transformers' defaults for settings missing in config.json."""


def _complete(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tower's section, with settings beside it: how its rows are made, and their width."""
    for name, only in (
        ("downsample_ratio", 1 / _MERGE),
        ("vision_feature_layer", -1),
        ("vision_feature_select_strategy", "default"),
    ):
        if config.get(name, only) != only:
            raise CheckpointError(f"{name} {config[name]} is not supported, {only} is")
    tower = {**_TOWER, **config["vision_config"], "projector_hidden_act": config.get("projector_hidden_act", "gelu")}
    for name in ("image_size", "patch_size"):
        tower[name] = _one(name, tower[name])
    if tower["image_size"] % (tower["patch_size"] * _MERGE):
        raise CheckpointError(f"tiles of {tower['image_size']} pixels have no whole number of rows")
    text = config.get("text_config") or {}
    return {**tower, "out_hidden_size": text["hidden_size"]} if "hidden_size" in text else tower


def _one(name: str, sides: Any) -> int:
    """A side, which may be stated for both dimensions."""
    if isinstance(sides, list) and len(set(sides)) != 1:
        raise CheckpointError(f"only a square {name} is supported")
    return int(sides[0] if isinstance(sides, list) else sides)


def _processors(checkpoint: Checkpoint, tower: Mapping[str, Any]) -> Mapping[Modality, Processor]:
    """Reads both layouts, `processor_config.json` of newer versions first. Videos are left out if frames are not
    resized to the tower's tiles: the reference fails there."""
    saved = checkpoint.json("processor_config.json")
    image = saved.get("image_processor") or checkpoint.json("preprocessor_config.json")
    video = saved.get("video_processor") or checkpoint.json("video_preprocessor_config.json") or image
    if not image:
        raise CheckpointError("the checkpoint has no preprocessor_config.json")
    if (side := _side(image)) != tower["image_size"]:
        raise CheckpointError(f"the processor's tiles have {side} pixels a side, the tower's {tower['image_size']}")
    least, most = int(image.get("min_patches") or 1), int(image.get("max_patches") or _DEFAULT_MOST)
    processors: dict[Modality, Processor] = {Modality.IMAGE: PictureTiles(_tiles(image, tower, least, most))}
    if _side(video) == tower["image_size"]:
        processors[Modality.VIDEO] = _frames(video, tower)
    return processors


def _frames(given: Mapping[str, Any], tower: Mapping[str, Any]) -> FrameTiles:
    if given.get("do_center_crop"):
        raise CheckpointError("a processor with do_center_crop is not supported")
    sampled, count, fps = (given.get(name) for name in ("do_sample_frames", "num_frames", "fps"))
    if sampled and not (count or fps):
        raise CheckpointError("the video processor samples frames, and says neither num_frames nor fps")
    shift = given.get("initial_shift", True)
    return FrameTiles(
        tiles=_tiles(given, tower, 1, 1),
        sampled=bool(sampled),
        count=None if count is None else int(count),
        fps=None if fps is None else float(fps),
        shift=None if shift is True else float(shift),
    )


def _side(given: Mapping[str, Any]) -> int:
    size = given.get("size") or {"height": _DEFAULT_SIDE, "width": _DEFAULT_SIDE}
    return _one("size", [size.get("height", 0), size.get("width", 0)])


def _tiles(given: Mapping[str, Any], tower: Mapping[str, Any], least: int, most: int) -> TileSettings:
    check_steps(given)
    side = tower["image_size"]
    return TileSettings(
        side,
        PixelSettings(
            min_pixels=least * side**2,
            max_pixels=most * side**2,
            patch=tower["patch_size"],
            temporal=1,
            merge=_MERGE,
            mean=tuple(given.get("image_mean") or CLIP_MEAN),
            std=tuple(given.get("image_std") or CLIP_STD),
            rescale=float(given.get("rescale_factor") or 1 / 255),
        ),
    )


INTERNVL = Family(
    tower="encoder_service.models.internvl:InternVLTower",
    row_shape=lambda tower: (1, int(tower["out_hidden_size"])),
    processors=_processors,
    parts=INTERNVL_PARTS,
    complete=_complete,
    texts=INTERNVL_TEXTS,
)
