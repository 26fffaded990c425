"""Which tower a checkpoint asks for, and how its weights get there."""

from __future__ import annotations

import importlib
from typing import Final

import torch
from torch import nn

from common.checkpoint import Checkpoint, CheckpointError
from common.identity import VISION_PREFIXES
from common.linear import finalize_linears
from common.weights import load_tensors
from encoder_service.models.choice import AttentionUnavailable, choose, choose_captured
from encoder_service.models.config import ModelConfig
from encoder_service.models.tower import PackedTower

TOWERS: Final = {
    "qwen2_vl": "encoder_service.models.qwen2_vl:Qwen2VLTower",
    "qwen2_5_vl": "encoder_service.models.qwen2_5_vl:Qwen25VLTower",
    "qwen3_vl": "encoder_service.models.qwen3_vl:Qwen3VLTower",
    "qwen3_vl_moe": "encoder_service.models.qwen3_vl:Qwen3VLTower",
}
"""From `model_type` in config.json to the tower's class, which is built from `vision_config`."""


def load_tower(
    checkpoint: Checkpoint, config: ModelConfig, device: torch.device, dtype: torch.dtype, attention: str = "auto"
) -> nn.Module:
    """Builds the tower (`tower.Tower`) and reads its weights, and no others, onto `device`.

    `attention` names a back end, or "auto", which is all that a tower with attention of its own goes with. Raises
    CheckpointError where the architecture is unknown, or a weight is missing, left over or of another shape, and
    AttentionUnavailable where the back end cannot run.
    """
    try:
        module, _, name = TOWERS[config.family].partition(":")
    except KeyError:
        raise CheckpointError(f"the vision tower of {config.family} is not supported") from None
    with torch.device("meta"):
        tower: nn.Module = getattr(importlib.import_module(module), name)(config.vision)
    state = {
        name: (tensor.flatten(1) if tensor.dim() > 2 else tensor).to(device=device, dtype=dtype)
        for name, tensor in load_tensors(checkpoint, vision_name)
    }
    try:
        tower.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"the vision weights do not fit the configuration: {error}") from error
    tower.eval().requires_grad_(requires_grad=False)
    finalize_linears(tower)
    if isinstance(tower, PackedTower):
        tower.backend = choose(attention, device, dtype, tower.head_dim)
        tower.captured = choose_captured(attention, device, dtype, tower.head_dim)
    elif attention != "auto":
        raise AttentionUnavailable(f"--attention {attention}: this model's tower has its own")
    return tower


def vision_name(name: str) -> str | None:
    """A checkpoint's tensor name without its vision prefix; None for a tensor that is not the tower's."""
    return next((name[len(prefix) :] for prefix in VISION_PREFIXES if name.startswith(prefix)), None)
