"""Layers that hold this rank's part of a weight, and know which part of the checkpoint's tensor that is.

So the loader reads only what a rank needs, and knows no model.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.linear import BlockedWeight, LaidOut, Linear
from llm_service.layers.cpu import selection
from llm_service.layers.group import TensorGroup
from llm_service.layers.quantization import Int8Weight, narrowed


class Stored(Protocol):
    """A tensor in a file: indexing reads that part alone."""

    def __getitem__(self, index: Any) -> Tensor: ...

    def get_shape(self) -> list[int]: ...


class PackedLinear(Linear):
    """y = x Wᵀ + b, where W stacks parts that the checkpoint keeps apart (q, k and v; gate and up).

    One product over the stack reads the input once and starts one kernel in place of several. `inputs` and `parts` are
    this rank's ranges of the checkpoint's columns and of each part's rows.
    """

    def __init__(self, inputs: slice, parts: dict[str, slice], *, bias: bool, dtype: torch.dtype) -> None:
        self.parts = parts
        super().__init__(length(inputs), sum(map(length, parts.values())), bias=bias, dtype=dtype)
        self._inputs = inputs
        self._missing = set(parts)

    def place(self, part: str, kind: str, stored: Stored) -> None:
        """Reads this rank's share of a part (`kind` is weight or bias); raises ValueError on a wrong shape."""
        names = list(self.parts)
        begin = sum(length(self.parts[name]) for name in names[: names.index(part)])
        target = getattr(self, kind)[begin : begin + length(self.parts[part])]
        rows = self.parts[part]
        source = stored[rows, self._inputs] if kind == "weight" else stored[rows]
        if target.shape != source.shape:
            raise ValueError(f"{part}.{kind} is {tuple(source.shape)}, expected {tuple(target.shape)}")
        target.copy_(source)
        if kind == "weight":
            self._missing.discard(part)

    def whole(self) -> bool:
        """Whether all parts of the weight have been read."""
        return not self._missing

    def finalize(self, *, int8: bool = False) -> None:
        """As `Linear.finalize`; with `int8` the weight is rounded to 8 bits."""
        if self.laid_out is None:
            self._replace_weight(laid_out(self.weight.detach(), int8=int8))


class VocabularyEmbedding(nn.Module):
    """Token embeddings, split over the ranks by token id."""

    def __init__(self, total: int, hidden: int, group: TensorGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self.share = group.vocabulary_share(total)
        self._group = group
        self._dtype = dtype
        self.weight = nn.Parameter(torch.empty(length(self.share), hidden, dtype=dtype), requires_grad=False)

    def finalize(self) -> None:
        """Called when the weight is final: it is kept in 16 bits where they have all of its numbers."""
        self.weight = nn.Parameter(narrowed(self.weight.detach()), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """int [n] → [n, hidden]."""
        if self._group.size == 1:
            return self._rows(token_ids)
        local = token_ids - self.share.start
        foreign = (local < 0) | (local >= self.weight.shape[0])
        if not len(self.weight):
            return self._group.sum(self.weight.new_zeros(len(token_ids), self.weight.shape[1], dtype=self._dtype))
        out = self._rows(local.masked_fill(foreign, 0))
        return self._group.sum(out.masked_fill(foreign.unsqueeze(1), 0.0))

    def _rows(self, token_ids: Tensor) -> Tensor:
        return functional.embedding(token_ids, self.weight).to(self._dtype)


def laid_out(weight: Tensor, *, int8: bool = False) -> LaidOut | None:
    """A weight that is final in the form that is computed with fastest here; None where that is as it is. With `int8`
    it is rounded to 8 bits, on any device."""
    if weight.device.type == "cpu" and selection.allows_panels():
        from llm_service.layers.cpu.panels import PanelWeight  # numba takes its time

        panels = PanelWeight.rounded(weight) if int8 else PanelWeight.of(weight)
        if panels is not None:
            return panels
    return Int8Weight.of(weight) if int8 else BlockedWeight.of(weight)


def length(part: slice) -> int:
    """How many there are."""
    return int(part.stop - part.start)
