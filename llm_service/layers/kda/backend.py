"""What a decoder asks of Kimi Delta Attention between its projections, whoever computes it.

All is as in a gated delta net (`gdn.backend`) but for what is left of a state, which is another share for each place of
a key, and for gates, which are sigmoids (Kimi Team 2025, https://arxiv.org/abs/2510.26692). A head's state S [head_dim,
head_dim] is read and written:

    S ← diag(e^g) · S;  S ← S + k · β(v − Sᵀk)ᵀ;  o = Sᵀq / √head_dim

with g = −e^a_log · softplus(a + dt_bias), or, where there is a `least`, least · σ(e^a_log · (a + dt_bias)), and β =
σ(b). What comes out is gain · o / rms(o) · σ(z), head by head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from llm_service.layers.cache_spec import SequenceState
from llm_service.layers.gdn.backend import GdnShape
from llm_service.layers.recurrent.backend import RecurrentBackend, RecurrentBatch


@dataclass(frozen=True, slots=True)
class KdaShape:
    """One rank's heads; `width` is how many tokens the convolution sees."""

    heads: int
    head_dim: int
    width: int = 4

    @property
    def values(self) -> int:
        """Numbers of a token's values, and of its queries, and of its keys."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Numbers of a token that are convolved: queries, then keys, then values."""
        return 3 * self.values

    def state(self, dtype: torch.dtype) -> SequenceState:
        """The state of a sequence, like that of a gated delta net with as many key heads."""
        return GdnShape(self.heads, self.heads, self.head_dim, self.head_dim, self.width).state(dtype)


@dataclass(frozen=True, slots=True)
class KdaWeights:
    """conv [channels, width], a_log [heads] and dt_bias [values], all float32; gain [head_dim], and the eps of its
    norm. `least` is the lower bound of g, None: no bound."""

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    gain: Tensor
    eps: float
    least: float | None


@dataclass(frozen=True, slots=True)
class KdaInput:
    """The projections of n tokens: qkv [n, channels], z and a [n, values], b [n, heads]. The numbers of a token are
    contiguous; tokens may be strided."""

    qkv: Tensor
    z: Tensor
    a: Tensor
    b: Tensor


KdaBatch: TypeAlias = RecurrentBatch[KdaInput, KdaWeights]
KdaBackend: TypeAlias = RecurrentBackend[KdaInput, KdaWeights]
