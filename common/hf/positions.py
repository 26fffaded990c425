"""Where a prompt's tokens are in time, height and width, by the rules of transformers' models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from common.checkpoints.checkpoint import CheckpointError


def rope_positions(base: Any, made: Mapping[str, Any], *, sound_in_video: bool = False) -> torch.Tensor:
    """Where a prompt's tokens are in time, height and width, int64 [3, n], by the model's own rule for what its
    processor has made, without an axis on which each is at its own number; `sound_in_video`: of videos, their sound
    is between their frames. Raises CheckpointError where there are other axes than three, ValueError where places are
    not whole numbers."""
    known = inspect.signature(base.get_rope_index).parameters
    named = {**made, **{own: tell(made) for own, (name, tell) in _RENAMED.items() if name in made}}
    if sound_in_video:
        named[SOUND_IN_VIDEO] = True
    found = base.get_rope_index(**{name: named[name] for name in known if name in named})[0][:, 0]
    if len(found) == _AXES + 1 and torch.equal(found[0], torch.arange(found.shape[1])):
        found = found[1:]
    if len(found) != _AXES:
        raise CheckpointError(f"{type(base).__name__} counts places on {len(found)} axes")
    positions: torch.Tensor = found.long()
    if not torch.equal(positions, found):
        raise ValueError(f"{type(base).__name__} counts places between whole numbers")
    return positions


def pinned_of(model: Any) -> tuple[int, ...]:
    """`HfModel.pinned` of a model. Raises CheckpointError where its configuration leaves such tokens out."""
    rule = getattr(model.base_model, "get_rope_index", None)
    if rule is None or CANVAS not in inspect.signature(rule).parameters:
        return ()
    found: tuple[Any, ...] = tuple(getattr(model.config, name, None) for name in _CANVAS_ENDS)
    if None in found:
        raise CheckpointError(f"{model.config.model_type} does not state its {_CANVAS_ENDS[found.index(None)]}")
    return found


def axes_of(model: Any) -> int:
    """The axes on which a model counts places: 1, 3, or 4 where each token's own number is another, before these."""
    if not hasattr(model.base_model, "get_rope_index"):
        return 1
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return max(_AXES, len(rope.get("mrope_section") or ()))


_AXES = 3
CANVAS = "target_sizes"
"""What a rule of positions wants that lays slices of a picture out on the whole: the patches of each."""
_CANVAS_ENDS = "image_end_id", "slice_end_id", "newline_id"
"""What a configuration calls tokens that such a rule counts to a picture right before them."""
SOUND_IN_VIDEO = "use_audio_in_video"
"""What such a rule is told so: of videos, their sound is between their frames."""
_RENAMED: dict[str, tuple[str, Callable[[Mapping[str, Any]], Any]]] = {
    "audio_seqlens": ("feature_attention_mask", lambda made: made["feature_attention_mask"].sum(-1)),
    "second_per_grids": ("video_second_per_grid", lambda made: torch.as_tensor(made["video_second_per_grid"])),
}
"""What the rule of positions calls otherwise than the processor, and how it is made of that."""
