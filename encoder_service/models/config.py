"""What a checkpoint's JSON files say about its vision tower and its processors, read without torch.

Both layouts are read: the published one (`preprocessor_config.json`, `video_preprocessor_config.json`, bounds as
`min_pixels` and `max_pixels`) and the one that `transformers` 5 saves (`processor_config.json`, bounds as `size`).
Where a file leaves a setting out, the reference's own default stands.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.checkpoint import Checkpoint, CheckpointError

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_BICUBIC = 3


class VideoRule(enum.Enum):
    """How a family samples and sizes a video."""

    PER_FRAME = "qwen2_vl"
    """Pixel bounds hold for each frame; frames are taken at equal steps from the first."""
    WHOLE = "qwen3_vl"
    """Pixel bounds hold for all frames together; frames are spread from the first to the last."""


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


@dataclass(frozen=True, slots=True)
class VideoSettings:
    """How a video is sampled and sized, beyond `pixels`."""

    pixels: PixelSettings
    rule: VideoRule
    fps: float
    min_frames: int
    max_frames: int
    cap_pixels_per_frame: bool
    max_video_tokens: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The tower's own numbers (`vision`, as in config.json) and the processors' settings."""

    architecture: str
    family: str
    vision: Mapping[str, Any]
    image: PixelSettings
    video: VideoSettings
    width: int
    levels: int


def read(checkpoint: Checkpoint) -> ModelConfig:
    """Reads a checkpoint's settings; raises CheckpointError where one is missing or not supported."""
    config = checkpoint.config
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        raise CheckpointError("config.json describes no vision tower")
    family = str(config.get("model_type", ""))
    saved = checkpoint.json("processor_config.json")
    image = saved.get("image_processor") or checkpoint.json("preprocessor_config.json")
    video = saved.get("video_processor") or checkpoint.json("video_preprocessor_config.json") or image
    if not image:
        raise CheckpointError("the checkpoint has no preprocessor_config.json")
    try:
        return _read(config, family, vision, image, video)
    except KeyError as error:
        raise CheckpointError(f"config.json of {family} does not state {error.args[0]} of a vision tower") from None


def _read(
    config: Mapping[str, Any],
    family: str,
    vision: Mapping[str, Any],
    image: Mapping[str, Any],
    video: Mapping[str, Any],
) -> ModelConfig:
    whole = family.startswith("qwen3")
    return ModelConfig(
        architecture=next(iter(config.get("architectures") or [family])),
        family=family,
        vision=vision,
        image=_pixels(image, vision, 56 * 56, 28 * 28 * 1280, _CLIP_MEAN, _CLIP_STD),
        video=_video(video, vision, VideoRule.WHOLE if whole else VideoRule.PER_FRAME),
        width=int(vision["hidden_size" if "embed_dim" in vision else "out_hidden_size"]),
        levels=1 + len(vision.get("deepstack_visual_indexes") or ()),
    )


def _video(given: Mapping[str, Any], vision: Mapping[str, Any], rule: VideoRule) -> VideoSettings:
    if rule is VideoRule.WHOLE:
        pixels = _pixels(given, vision, 128 * 32 * 32, 768 * 32 * 32, (0.5,) * 3, (0.5,) * 3)
    else:
        pixels = _pixels(given, vision, 128 * 28 * 28, 768 * 28 * 28, _CLIP_MEAN, _CLIP_STD)
    return VideoSettings(
        pixels=pixels,
        rule=rule,
        fps=float(given.get("fps") or 2.0),
        min_frames=int(given.get("min_frames") or 4),
        max_frames=int(given.get("max_frames") or 768),
        cap_pixels_per_frame=bool(given.get("cap_pixels_per_frame")),
        max_video_tokens=int(given.get("max_video_tokens") or (768 if rule is VideoRule.WHOLE else 128_000)),
    )


def _pixels(
    given: Mapping[str, Any],
    vision: Mapping[str, Any],
    least: int,
    most: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> PixelSettings:
    for step in ("do_resize", "do_rescale", "do_normalize"):
        if given.get(step, True) is not True:
            raise CheckpointError(f"a processor with {step} off is not supported")
    if given.get("resample", _BICUBIC) != _BICUBIC:
        raise CheckpointError("only bicubic resizing is supported")
    size = given.get("size") or {}
    return PixelSettings(
        min_pixels=int(given.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or least),
        max_pixels=int(given.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or most),
        patch=int(given.get("patch_size") or vision["patch_size"]),
        temporal=int(given.get("temporal_patch_size") or vision["temporal_patch_size"]),
        merge=int(given.get("merge_size") or vision["spatial_merge_size"]),
        mean=tuple(given.get("image_mean") or mean),
        std=tuple(given.get("image_std") or std),
        rescale=float(given.get("rescale_factor") or 1 / 255),
    )
