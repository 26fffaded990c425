"""How a family's tower is built, and how its weights get there."""

from __future__ import annotations

import importlib

import torch
from torch import nn

from common.checkpoint import Checkpoint, CheckpointError
from common.identity import VISION_PREFIXES
from common.linear import finalize_linears
from common.weights import load_tensors
from encoder_service.families.family import ModelConfig
from encoder_service.models.attention_choice import AttentionUnavailable, choose, choose_captured
from encoder_service.models.tower import PackedTower


def load_tower(
    checkpoint: Checkpoint, config: ModelConfig, device: torch.device, dtype: torch.dtype, attention: str = "auto"
) -> nn.Module:
    """Builds the tower (`tower.Tower`) and reads its weights, and no others, onto `device`.

    `attention` names a back end, or "auto", which is all that a tower with attention of its own goes with. Raises
    CheckpointError where a weight is missing, left over or of another shape, and
    AttentionUnavailable where the back end cannot run.
    """
    module, _, name = config.family.tower.partition(":")
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
