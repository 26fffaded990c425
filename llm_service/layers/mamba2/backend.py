"""What a decoder asks of a Mamba-2 layer between its projections, whoever computes it.

What a token is projected to for x, B and C goes through a causal convolution of a few tokens, biases and SiLU. Then a
head's state S [state, head_dim] is read and written:

    S ← e^(Δ · a) · S + B (Δ · x)ᵀ;  y = Sᵀ C + d · x

with a = −e^a_log and Δ = softplus(dt + dt_bias), in prompts no less than `least_step`. Head h has B and C of the group
h // (heads / groups). What comes out is gain · u / rms(u) with u = y · SiLU(z), group by group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from llm_service.layers.cache_spec import SequenceState
from llm_service.layers.recurrent.backend import CHUNK, RecurrentBackend, RecurrentBatch


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """One rank's heads; `width` is how many tokens the convolution sees, `least_step` the least Δ of a prompt's
    tokens."""

    groups: int
    heads: int
    head_dim: int
    state_dim: int
    width: int = 4
    least_step: float = 0.0

    @property
    def values(self) -> int:
        """Numbers of a token's x, and of its z."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Numbers of a token's B; its C has as many."""
        return self.groups * self.state_dim

    @property
    def channels(self) -> int:
        """Numbers of a token that are convolved: x, then B, then C."""
        return self.values + 2 * self.keys

    @property
    def group(self) -> int:
        """Heads for each group."""
        return self.heads // self.groups

    def state(self, dtype: torch.dtype) -> SequenceState:
        """The state of a sequence: the last projected tokens, [channels, width − 1] in the model's type, and every
        head's S, [heads, state, head_dim] in float32."""
        recurrent = (self.heads, self.state_dim, self.head_dim)
        tensors = ((self.channels, self.width - 1), dtype), (recurrent, torch.float32)
        return SequenceState(tensors, chunk=CHUNK)


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """conv [channels, width], with biases [channels]; a_log, dt_bias and d [heads]; gain [values], and the eps of its
    norm."""

    conv: Tensor
    conv_bias: Tensor
    a_log: Tensor
    dt_bias: Tensor
    d: Tensor
    gain: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Mamba2Input:
    """The projections of n tokens: z [n, values], xbc [n, channels], dt [n, heads]. The numbers of a token are
    contiguous; tokens may be strided."""

    z: Tensor
    xbc: Tensor
    dt: Tensor


Mamba2Batch: TypeAlias = RecurrentBatch[Mamba2Input, Mamba2Weights]
Mamba2Backend: TypeAlias = RecurrentBackend[Mamba2Input, Mamba2Weights]
