"""A configuration's settings of layers with states: gated delta nets, Mamba-2 and short convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from common.checkpoints.checkpoint import CheckpointError


@dataclass(frozen=True, slots=True)
class DeltaNetConfig:
    """Heads of gated delta nets, and how long theirs are; the convolution sees `width` tokens."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """Mamba-2: the number of heads; groups of heads, which share their input and output projections; sizes of heads and
    states. The convolution sees `width` tokens, with or without biases. The time steps of a prompt's tokens are at
    least `least_step`."""

    groups: int
    heads: int
    head_dim: int
    state_dim: int
    width: int
    bias: bool
    least_step: float


@dataclass(frozen=True, slots=True)
class KimiDeltaConfig:
    """Kimi Delta Attention: heads of size `head_dim`; the convolution sees `width` tokens. `least` bounds the logarithm
    of the decay of a state from below; None: no bound."""

    heads: int
    head_dim: int
    width: int
    least: float | None


class GateActivation(Enum):
    """The activation of the output gates of gated delta nets; values are names in configurations."""

    SILU = "silu"
    SIGMOID = "sigmoid"


def delta_net_of(text: dict[str, Any]) -> DeltaNetConfig:
    """Heads of its gated delta nets."""
    return DeltaNetConfig(
        key_heads=int(text["linear_num_key_heads"]),
        value_heads=int(text["linear_num_value_heads"]),
        key_dim=int(text["linear_key_head_dim"]),
        value_dim=int(text["linear_value_head_dim"]),
        width=int(text["linear_conv_kernel_dim"]),
    )


def kimi_delta_of(text: Mapping[str, Any]) -> KimiDeltaConfig:
    """Reads Kimi Delta Attention. Raises CheckpointError if the convolution's activation is not SiLU."""
    if (activation := text.get("hidden_act", "silu")) != "silu":
        raise CheckpointError(f"Kimi Delta Attention with the activation {activation} is not supported")
    least = text.get("linear_lower_bound")
    return KimiDeltaConfig(
        heads=int(text["linear_num_heads"]),
        head_dim=int(text["linear_head_dim"]),
        width=int(text["linear_conv_kernel_dim"]),
        least=None if least is None else float(least),
    )


def delta_gates_of(text: Mapping[str, Any]) -> GateActivation:
    """The activation of output gates; raises CheckpointError if it is unknown."""
    kind = text.get("output_gate_type") or GateActivation.SILU.value
    if kind not in {each.value for each in GateActivation}:
        raise CheckpointError(f"gates of delta nets by {kind} are not supported")
    return GateActivation(kind)


def mamba2_of(text: Mapping[str, Any]) -> Mamba2Config:
    """Reads Mamba-2; raises CheckpointError if a setting is not supported."""
    if unknown := next((name for name in ("use_bias", "mlp_bias") if text.get(name)), None):
        raise CheckpointError(f"{unknown} is not supported")
    if (activation := text.get("mamba_hidden_act", "silu")) != "silu":
        raise CheckpointError(f"Mamba-2 with the activation {activation} is not supported")
    return Mamba2Config(
        groups=int(text["n_groups"]),
        heads=int(text["mamba_num_heads"]),
        head_dim=int(text["mamba_head_dim"]),
        state_dim=int(text["ssm_state_size"]),
        width=int(text["conv_kernel"]),
        bias=bool(text.get("use_conv_bias", True)),
        least_step=float(text.get("time_step_min", 0.001)),
    )


def convolution_width_of(text: Mapping[str, Any]) -> int:
    """Tokens that a short convolution sees; raises CheckpointError if it has biases."""
    if text.get("conv_bias"):
        raise CheckpointError("short convolutions with biases are not supported")
    return int(text["conv_L_cache"])
