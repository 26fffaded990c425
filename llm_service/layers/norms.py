"""Norms of rows, and their weights in a checkpoint."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from llm_service.layers.linear.placement import Place, Stored, fill
from llm_service.layers.ops import TORCH, Pair, RowOps
from llm_service.model_config.text import TextConfig


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension (Zhang and Sennrich 2019).

    If it is `zero_centred`, a checkpoint stores the weight less 1. The sum needs more digits than 16 bits have; with
    `long_gain` it keeps them. `stored_as` is its name in a checkpoint, if it differs from its attribute's.
    """

    ops: RowOps = TORCH

    def __init__(
        self,
        size: int,
        eps: float,
        dtype: torch.dtype,
        *,
        zero_centred: bool = False,
        long_gain: bool = False,
        stored_as: str = "",
    ) -> None:
        super().__init__()
        self.eps = eps
        if stored_as:
            self.stored_as = stored_as
        self._zero_centred = zero_centred
        kept = torch.float32 if zero_centred or long_gain else dtype
        self.weight = nn.Parameter(torch.empty(size, dtype=kept), requires_grad=False)

    @classmethod
    def of(
        cls,
        config: TextConfig,
        size: int,
        dtype: torch.dtype,
        stored_as: str = "",
        *,
        eps: float | None = None,
        last: bool = False,
    ) -> Self:
        """A norm of a decoder, with the configuration's eps, unless given; `last`: the final norm."""
        whole = last and config.family.norms.plain_final
        zero_centred = config.family.norms.zero_centred and not whole
        long_gain = config.family.norms.float32_weights or whole
        eps = config.norm_eps if eps is None else eps
        return cls(size, eps, dtype, zero_centred=zero_centred, long_gain=long_gain, stored_as=stored_as)

    def targets(self, own: str) -> dict[str, Place]:
        """See `Placed`."""
        return {f"{own}.weight": self._place}

    def _place(self, stored: Stored) -> None:
        fill(self.weight, stored[:].float() + 1 if self._zero_centred else stored[:])

    def forward(self, x: Tensor) -> Tensor:
        """[n, size] → the same."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def after_adding(self, x: Tensor, more: Tensor | None) -> Pair:
        """[n, size] each → their sum, and its norm; of x alone if there is nothing to add."""
        if more is None:
            return x, self(x)
        return self.ops.add_rms_norm(x, more, self.weight, self.eps)


class PlainNorm(RMSNorm):
    """A norm without a weight."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, **given: Any) -> None:
        super().__init__(size, eps, dtype, **given)
        self.weight.fill_(1.0)

    def targets(self, _: str) -> dict[str, Place]:
        """It has no tensors."""
        return {}


class LayerNorm(RMSNorm):
    """(x - mean(x)) / deviation(x) · weight over the last dimension (Ba, Kiros and Hinton 2016), without a bias."""

    def forward(self, x: Tensor) -> Tensor:
        """[n, size] → the same."""
        return functional.layer_norm(x, self.weight.shape, self.weight, None, self.eps)

    def after_adding(self, x: Tensor, more: Tensor | None) -> Pair:
        """See `RMSNorm`."""
        total = x if more is None else x + more
        return total, self(total)


class BiasedLayerNorm(LayerNorm):
    """The same with a bias."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, **given: Any) -> None:
        super().__init__(size, eps, dtype, **given)
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)

    def targets(self, own: str) -> dict[str, Place]:
        """See `Placed`."""
        return {**super().targets(own), f"{own}.bias": self._place_bias}

    def _place_bias(self, stored: Stored) -> None:
        fill(self.bias, stored[:])

    def forward(self, x: Tensor) -> Tensor:
        """[n, size] → the same."""
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class Unnormed(nn.Module):
    """Takes the place of a missing norm."""

    def after_adding(self, x: Tensor, more: Tensor | None) -> Pair:
        """[n, size] each → their sum, twice."""
        total = x if more is None else x + more
        return total, total


def norm_of(
    config: TextConfig, dtype: torch.dtype, stored_as: str = "", *, eps: float | None = None, last: bool = False
) -> RMSNorm:
    """The norm of a decoder's hidden states, of its family's kind; see `RMSNorm.of`."""
    kind = RMSNorm
    if config.family.norms.layer_norm:
        kind = BiasedLayerNorm if config.family.norms.biases else LayerNorm
    return kind.of(config, config.hidden_size, dtype, stored_as, eps=eps, last=last)
