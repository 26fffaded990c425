"""What a decoder asks of a gated delta net between its projections, whoever computes it.

A token's queries, keys and values, as they are projected, go through a causal convolution of a few tokens and SiLU.
Heads of queries and keys are made one long; then a value head's state S [key_dim, value_dim] is read and written:

    S ← e^g · S;  S ← S + k · β(v − Sᵀk)ᵀ;  o = Sᵀq / √key_dim

with g = −e^a_log · softplus(a + dt_bias) and β = σ(b). Value head h reads key head h // (value_heads / key_heads).
What comes out is gain · o / rms(o) · SiLU(z), head by head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from llm_service.layers.cache_spec import SequenceState
from llm_service.layers.recurrent.backend import CHUNK, RecurrentBackend, RecurrentBatch


@dataclass(frozen=True, slots=True)
class GdnShape:
    """One rank's heads; `width` is how many tokens the convolution sees."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int = 4

    @property
    def keys(self) -> int:
        """Numbers of a token's keys; its queries have as many."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Numbers of a token's values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Numbers of a token that are convolved: queries, then keys, then values."""
        return 2 * self.keys + self.values

    @property
    def group(self) -> int:
        """Value heads for each key head."""
        return self.value_heads // self.key_heads

    def state(self, dtype: torch.dtype) -> SequenceState:
        """The state of a sequence: the last projected tokens, [channels, width − 1] in the model's type, and every
        value head's S, [value_heads, key_dim, value_dim] in float32."""
        recurrent = (self.value_heads, self.key_dim, self.value_dim)
        tensors = ((self.channels, self.width - 1), dtype), (recurrent, torch.float32)
        return SequenceState(tensors, chunk=CHUNK)


@dataclass(frozen=True, slots=True)
class GdnWeights:
    """conv [channels, width]; a_log and dt_bias [value_heads]; gain [value_dim], and the eps of its norm."""

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    gain: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class GdnInput:
    """The projections of n tokens: qkv [n, channels], z [n, values], a and b [n, value_heads]. The numbers of a token
    are contiguous; tokens may be strided."""

    qkv: Tensor
    z: Tensor
    a: Tensor
    b: Tensor


GdnBatch: TypeAlias = RecurrentBatch[GdnInput, GdnWeights]
GdnBackend: TypeAlias = RecurrentBackend[GdnInput, GdnWeights]
