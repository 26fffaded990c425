"""Which family a checkpoint is of, and what its JSON files say about its vision tower and its processors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from common.checkpoint import Checkpoint, CheckpointError
from encoder_service.families.family import Family, ModelConfig, PixelDefaults, PixelSettings, VideoSettings
from encoder_service.families.qwen2_vl import QWEN2_5_VL, QWEN2_VL
from encoder_service.families.qwen3_vl import QWEN3_VL

FAMILIES: Final = {
    "qwen2_vl": QWEN2_VL,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL,
}
"""By `model_type` in config.json."""

_BICUBIC = 3


def find_family(model_type: str) -> Family:
    """The family of a checkpoint; raises CheckpointError where none is known. Another kind of back end, one that serves
    any tower, would be found here."""
    try:
        return FAMILIES[model_type]
    except KeyError:
        raise CheckpointError(f"the vision tower of {model_type} is not supported") from None


def read(checkpoint: Checkpoint) -> ModelConfig:
    """Reads a checkpoint's settings; raises CheckpointError where one is missing or not supported.

    Both layouts are read: the published one (`preprocessor_config.json`, `video_preprocessor_config.json`, bounds as
    `min_pixels` and `max_pixels`) and the one that `transformers` 5 saves (`processor_config.json`, bounds as `size`).
    Where a file leaves a setting out, the reference's own default stands.
    """
    config = checkpoint.config
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        raise CheckpointError("config.json describes no vision tower")
    model_type = str(config.get("model_type", ""))
    family = find_family(model_type)
    saved = checkpoint.json("processor_config.json")
    image = saved.get("image_processor") or checkpoint.json("preprocessor_config.json")
    video = saved.get("video_processor") or checkpoint.json("video_preprocessor_config.json") or image
    if not image:
        raise CheckpointError("the checkpoint has no preprocessor_config.json")
    try:
        return ModelConfig(
            architecture=next(iter(config.get("architectures") or [model_type])),
            family=family,
            vision=vision,
            image=_pixels(image, vision, family.image),
            video=_video(video, vision, family),
            width=family.row_width(vision),
            levels=1 + len(vision.get("deepstack_visual_indexes") or ()),
        )
    except KeyError as error:
        raise CheckpointError(f"config.json of {model_type} does not state {error.args[0]} of a vision tower") from None


def _video(given: Mapping[str, Any], vision: Mapping[str, Any], family: Family) -> VideoSettings:
    return VideoSettings(
        pixels=_pixels(given, vision, family.video),
        rule=family.rule,
        fps=float(given.get("fps") or 2.0),
        min_frames=int(given.get("min_frames") or 4),
        max_frames=int(given.get("max_frames") or 768),
        cap_pixels_per_frame=bool(given.get("cap_pixels_per_frame")),
        max_video_tokens=int(given.get("max_video_tokens") or family.max_video_tokens),
    )


def _pixels(given: Mapping[str, Any], vision: Mapping[str, Any], default: PixelDefaults) -> PixelSettings:
    for step in ("do_resize", "do_rescale", "do_normalize"):
        if given.get(step, True) is not True:
            raise CheckpointError(f"a processor with {step} off is not supported")
    if given.get("resample", _BICUBIC) != _BICUBIC:
        raise CheckpointError("only bicubic resizing is supported")
    size = given.get("size") or {}
    return PixelSettings(
        min_pixels=int(
            given.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or default.min_pixels
        ),
        max_pixels=int(
            given.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or default.max_pixels
        ),
        patch=int(given.get("patch_size") or vision["patch_size"]),
        temporal=int(given.get("temporal_patch_size") or vision["temporal_patch_size"]),
        merge=int(given.get("merge_size") or vision["spatial_merge_size"]),
        mean=tuple(given.get("image_mean") or default.mean),
        std=tuple(given.get("image_std") or default.std),
        rescale=float(given.get("rescale_factor") or 1 / 255),
    )
