"""A configuration's settings of feed-forward parts: activations and sizes."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from common.checkpoints.checkpoint import CheckpointError
from llm_service.families.family import Family
from llm_service.families.gates import BoundedGates, CutGates, Gates, RaisedGates
from llm_service.model_config.experts import first_of


class Activation(Enum):
    """The activation of a feed-forward part's gates, or between its products if it has no gates; values are names in
    configurations."""

    SILU = "silu"
    GELU = "gelu_pytorch_tanh"
    SQUARED_RELU = "relu2"
    RELU = "relu"
    XIELU = "xielu"


def activation_of(text: Mapping[str, Any], family: Family) -> Activation:
    """Raises CheckpointError for one that is unknown, or that the family's parts do not go with."""
    names = "hidden_activation", "hidden_act", "mlp_hidden_act", "activation_function"
    activation = str(first_of(text, *names) or "silu")
    ungated = activation in (Activation.SQUARED_RELU.value, Activation.RELU.value, Activation.XIELU.value)
    if activation not in {each.value for each in Activation} or ungated != family.mlp.ungated:
        raise CheckpointError(f"activation {activation} is not supported")
    return Activation(activation)


def gates_of(text: Mapping[str, Any], limits: str, *, cut: bool = True) -> tuple[Gates | None, ...]:
    """The gates of each layer, by the list of limits that a configuration calls `limits`, in which 0 means no limit;
    empty if no layer has limits. A single limit for all layers applies if `cut`. Raises CheckpointError if gates are
    limited and the activation is not SiLU."""
    count = int(text["num_hidden_layers"])
    if (sharpness := text.get("swiglu_alpha")) is not None:
        return (RaisedGates(float(sharpness), float(text["swiglu_limit"])),) * count
    if cut and (limit := text.get("swiglu_limit")) is not None:
        if (activation := text.get("hidden_act", "silu")) != Activation.SILU.value:
            raise CheckpointError(f"gates of {activation} that are cut are not supported")
        return (CutGates(float(limit)),) * count
    each = [limit or None for limit in text.get(limits) or ()][:count]
    return tuple(None if limit is None else BoundedGates(float(limit)) for limit in each) if any(each) else ()


def inner_size(text: Mapping[str, Any]) -> int:
    """Numbers between the two products of a feed-forward part. Some configurations state what would be with two
    matrices, for which there are three as large together: of a multiple of so many.

    >>> stated = {"intermediate_size": 1000, "block_auto_adjust_ff_dim": True, "block_multiple_of": 256}
    >>> inner_size(stated), inner_size({**stated, "block_auto_adjust_ff_dim": False})
    (768, 1000)
    """
    stated = text["ffn_dim"] if "ffn_dim" in text else text["intermediate_size"]
    size = int(max(stated) if isinstance(stated, list) else stated)
    if not text.get("block_auto_adjust_ff_dim"):
        return size
    multiple = int(text.get("block_multiple_of", 256))
    size = int(text.get("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple


def inner_sizes(text: Mapping[str, Any]) -> tuple[int, ...]:
    """The inner size of each layer's feed-forward part; empty if all are equal. Raises CheckpointError if there is not
    one for each layer."""
    stated = text.get("intermediate_size")
    if not isinstance(stated, list) or len(set(stated)) < 2:
        return ()
    if len(stated) != int(text["num_hidden_layers"]):
        raise CheckpointError("intermediate_size is not of each layer")
    return tuple(map(int, stated))


def cut_shares(text: Mapping[str, Any]) -> tuple[float, ...]:
    """For each layer, the share of gates that are dropped; empty if none are."""
    stated = text.get("activation_sparsity_pattern") or ()
    return tuple(map(float, stated)) if any(stated) else ()
