"""A configuration's settings of attention: heads, and how scores are scaled and capped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.checkpoints.checkpoint import CheckpointError
from llm_service.families.family import FULL, SLIDING, Mixer
from llm_service.model_config.own_settings import KEY_HEADS, QUERY_HEADS, own_settings
from llm_service.model_config.rotary import RotaryConfig


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The number of heads of keys and values, and their size. `keys_as_values`: one projection gives both, and the
    value is the key before norm and rotation."""

    kv_heads: int
    head_dim: int
    keys_as_values: bool = False

    @classmethod
    def of_full(cls, text: Mapping[str, Any], types: Sequence[str], usual: HeadShape) -> HeadShape | None:
        """The heads of layers without a window, if they differ from the usual ones. Configurations state them as
        `global_head_dim` and `num_global_key_value_heads`, or, in recent versions, layer by layer.

        Raises CheckpointError as `own_settings`.
        """
        same = bool(text.get("attention_k_eq_v"))
        heads, dim = text.get("num_global_key_value_heads") if same else None, text.get("global_head_dim")
        if text.get("per_layer_config") is not None:
            own = own_settings(text, types, FULL, KEY_HEADS)
            heads, dim = own.get("num_key_value_heads"), own.get("head_dim")
        found = cls(int(heads or usual.kv_heads), int(dim or usual.head_dim), same)
        return None if found == usual else found


def local_heads(text: Mapping[str, Any], types: Sequence[str]) -> int | None:
    """The number of query heads of layers with a window, if it differs. Raises CheckpointError as `own_settings`."""
    own = own_settings(text, types, SLIDING, {QUERY_HEADS})
    found, usual = own.get(QUERY_HEADS), int(text[QUERY_HEADS])
    return None if found in (None, usual) else int(found)


def attention_scale(text: Mapping[str, Any], head_dim: int) -> float | None:
    """The factor of products of queries and keys, None for the usual one. Configurations state it, or the number whose
    inverse square root it is."""
    scale, scalar = text.get("attention_multiplier"), text.get("query_pre_attn_scalar")
    if scale is not None:
        return float(scale)
    if (factor := text.get("qk_scale_factor")) is not None:  # a factor besides head_dim^-0.5
        return float(factor) / math.sqrt(head_dim)
    return None if scalar is None else float(scalar) ** -0.5


def attention_cap(text: Mapping[str, Any], mixers: Iterable[Mixer]) -> float | None:
    """The soft cap of attention scores. Raises CheckpointError if a layer has one whose mixer does not support it."""
    if (cap := text.get("attn_logit_softcapping")) is None:
        return None
    if others := [each for each in mixers if each in _UNCAPPED]:
        raise CheckpointError(f"soft caps of scores are not supported in {others[0].value}")
    return float(cap)


_UNCAPPED = (
    Mixer.LATENT_ATTENTION,
    Mixer.INDEXED_ATTENTION,
    Mixer.BLOCK_INDEXED_ATTENTION,
    Mixer.INDEXED_LATENT_ATTENTION,
    Mixer.POOLED_LATENT_ATTENTION,
)
"""The attention mixers without soft caps."""


def mixer_with(mixer: Mixer, rotary: RotaryConfig) -> Mixer:
    """The mixer, or its variant with temperature scaling if queries grow within the context. Raises CheckpointError if
    it has no such variant."""
    if rotary.tempering is None:
        return Mixer.ATTENTION if mixer is Mixer.TEMPERED_ATTENTION else mixer
    if mixer not in (Mixer.TEMPERED_ATTENTION, Mixer.LATENT_ATTENTION):
        what = "queries that are scaled by their places are not supported here"
        raise CheckpointError(f"{what}: no context may be longer than {rotary.tempering.reach} tokens (--max-context)")
    return mixer
