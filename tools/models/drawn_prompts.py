"""Prompts for models of transformers that have no processor."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from common.hf.positions import CANVAS, axes_of
from common.hf.rows import row_token
from llm_service.models.trial_prompts import GRIDS, MASK, TOKEN_TYPES, TrialPrompt, prompt_of


def drawn_prompt(model: Any) -> TrialPrompt:
    """Tokens of text, and two runs of rows among them: for a model without a processor. Types tell rows from text, but
    where all tokens of a prompt see each other an answer from a prompt."""
    config = model.config
    token = row_token(config)
    merge = getattr(getattr(config, "vision_config", None), "spatial_merge_size", 1)
    grids = torch.tensor([[1, 3 * merge, 4 * merge], [1, 2 * merge, 3 * merge]])
    first, second = _rows_of(model, grids)
    ids = torch.arange(22 + first + second) % 7 + 3
    ids[8 : 8 + first], ids[12 + first : 12 + first + second] = token, token
    types = (ids == token).long().unsqueeze(0)
    if getattr(config.get_text_config(decoder=True), "use_bidirectional_attention", None) is True:
        types.zero_()
    mask = torch.ones_like(types)
    sizes = torch.tensor([[3, 4], [2, 3]]) * _merge_of_canvas(config)
    return prompt_of(config, ids, {**dict.fromkeys(TOKEN_TYPES, types), GRIDS: grids, CANVAS: sizes, MASK: mask})


def _rows_of(model: Any, grids: Tensor) -> list[int]:
    """How many places each picture of these patches, int64 [k, 3] in time, height and width, has: by a model's own rule
    of where they are, since some have one more at each line's end, and some have marks of their own besides."""
    merge = getattr(getattr(model.config, "vision_config", None), "spatial_merge_size", 1)
    rows = [(int(height) // merge, int(width) // merge) for _, height, width in grids]
    if axes_of(model) > 3:
        return [height * (width + 1) + 2 for height, width in rows]
    rule = getattr(model.base_model, "get_vision_position_ids", None)
    known = inspect.signature(rule).parameters if rule is not None else {}
    if not {"start_position", "grid_thw"} <= known.keys() or "canvas_height" in known:  # the latter is told no time
        return [height * width for height, width in rows]
    assert rule is not None
    return [rule(start_position=0, grid_thw=grid, spatial_merge_size=merge).shape[-1] for grid in grids]


def _merge_of_canvas(config: Any) -> int:
    """Patches on a side of one row, in models that lay slices of a picture out on the whole."""
    return 2 if getattr(config, "downsample_mode", None) == "4x" else 4
