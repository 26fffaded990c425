"""Settings that layers of one type have of their own, as configurations state them layer by layer
(`per_layer_config`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from common.checkpoints.checkpoint import CheckpointError

QUERY_HEADS = "num_attention_heads"
KEY_HEADS = {"head_dim", "num_key_value_heads"}
LATENT_SIZES = {"kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
_KNOWN = {QUERY_HEADS} | KEY_HEADS | LATENT_SIZES


def own_settings(
    text: Mapping[str, Any], types: Sequence[str], wanted: str, names: Collection[str]
) -> Mapping[str, Any]:
    """The settings, among `names`, that all layers of the type `wanted`, and no others, have of their own. Raises
    CheckpointError if other layers have some, layers of one type differ, or a layer has any further setting of its
    own."""
    apart = {int(layer): own for layer, own in (text.get("per_layer_config") or {}).items()}
    if unknown := sorted({name for own in apart.values() for name in own} - _KNOWN):
        raise CheckpointError(f"layers with {unknown[0]} of their own are not supported")
    named = [{name: apart.get(layer, {}).get(name) for name in names} for layer in range(len(types))]
    each = [{name: value for name, value in own.items() if value is not None} for own in named]
    found = next((own for own, kind in zip(each, types, strict=True) if kind == wanted), {})
    if any(own != (found if kind == wanted else {}) for own, kind in zip(each, types, strict=True)):
        raise CheckpointError("layers of one type with different heads are not supported")
    return found
