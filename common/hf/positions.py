"""Positions of a prompt's tokens in time, height and width, by the rules of transformers' models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from common.checkpoints.checkpoint import CheckpointError


def rope_positions(base: Any, made: Mapping[str, Any], *, sound_in_video: bool = False) -> torch.Tensor:
    """The positions of a prompt's tokens in time, height and width, int64 [3, n], by the model's own rule for the
    processor's output, without an axis of tokens' own numbers; `sound_in_video`: videos' sound is between their frames.
    Raises CheckpointError for any but three axes, ValueError if positions are not integers."""
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
    """`HfModel.pinned` of a model. Raises CheckpointError if its configuration lacks such tokens."""
    rule = getattr(model.base_model, "get_rope_index", None)
    if rule is None or CANVAS not in inspect.signature(rule).parameters:
        return ()
    found: tuple[Any, ...] = tuple(getattr(model.config, name, None) for name in _CANVAS_ENDS)
    if None in found:
        raise CheckpointError(f"{model.config.model_type} does not state its {_CANVAS_ENDS[found.index(None)]}")
    return found


def axes_of(model: Any) -> int:
    """The number of position axes of a model: 1, 3, or 4 if a token's own number precedes the others."""
    if not hasattr(model.base_model, "get_rope_index"):
        return 1
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return max(_AXES, len(rope.get("mrope_section") or ()))


_AXES = 3
CANVAS = "target_sizes"
"""An argument of rules that arrange slices on the whole picture: the patches of each."""
_CANVAS_ENDS = "image_end_id", "slice_end_id", "newline_id"
"""Configurations' names of tokens that such a rule counts to the picture right before them."""
SOUND_IN_VIDEO = "use_audio_in_video"
"""The argument by which such a rule is told that videos' sound is between their frames."""
_RENAMED: dict[str, tuple[str, Callable[[Mapping[str, Any]], Any]]] = {
    "audio_seqlens": ("feature_attention_mask", lambda made: made["feature_attention_mask"].sum(-1)),
    "second_per_grids": ("video_second_per_grid", lambda made: torch.as_tensor(made["video_second_per_grid"])),
}
"""Arguments that the rule of positions names differently from the processor, and how they are derived."""
