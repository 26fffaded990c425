"""Layers of transformers with multi-head latent attention: the latent is cached instead of keys and values, and queries
are multiplied with it as in `layers/mla/up_projections`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_EXPANDS = "expand_kv"
"""The method of transformers' layers that makes all heads' keys [1, heads, n, width] and values from latents [1, 1, n,
rank] and the rotated keys [1, 1, n, rotated] that all heads share."""


def take_latents(text: nn.Module) -> None:
    """Has a text's layers pass on latents instead of keys and values, unless they make these by quantised weights."""
    parts: list[Any] = list(text.modules())
    for part in parts:
        if hasattr(part, _EXPANDS) and isinstance(part.kv_b_proj, nn.Linear):
            setattr(part, _EXPANDS, partial(_kept, part))


def _kept(_: nn.Module, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([latents, rotated], dim=-1), latents


def rank_of(module: Any) -> int:
    """Width of the latents that a layer passes on, the first numbers of its keys; 0 if it passes none."""
    return int(module.kv_lora_rank) if isinstance(vars(module).get(_EXPANDS), partial) else 0


def absorbed(module: Any, query: Tensor) -> Tensor:
    """A layer's queries [n, heads, plain + rotated] → those to multiply with what it passes on, [n, heads, rank +
    rotated]."""
    plain = module.qk_nope_head_dim
    made = torch.bmm(query[..., :plain].transpose(0, 1), _matrices(module)[:, :plain])
    return torch.cat([made.transpose(0, 1), query[..., plain:]], dim=-1)


def values_of(module: Any, mixed: Tensor) -> Tensor:
    """Weighted sums of a layer's latents [n, heads, rank] → those of values, [n, heads, depth]."""
    matrices = _matrices(module)[:, module.qk_nope_head_dim :].transpose(1, 2)
    return torch.bmm(mixed.transpose(0, 1), matrices).transpose(0, 1)


def _matrices(module: Any) -> Tensor:
    """This rank's heads' [heads, plain + depth, rank]."""
    weight: Tensor = module.kv_b_proj.weight
    return weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, weight.shape[1])


def sources_of(text: nn.Module) -> dict[int, int]:
    """Layers that use another layer's latents, and that layer, by number: the last one before them that shares its own,
    among those that rotate keys likewise."""
    parts: list[Any] = list(text.modules())
    kept, found = dict[bool, int](), dict[int, int]()
    for part in parts:
        if not rank_of(part):
            continue
        if getattr(part, "is_kv_shared_layer", False):
            found[part.layer_idx] = kept[bool(part.use_rope)]
        elif getattr(part, "store_full_length_kv", False):
            kept[bool(part.use_rope)] = part.layer_idx
    return found
