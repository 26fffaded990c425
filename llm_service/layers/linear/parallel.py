"""Linear layers and embeddings that hold this rank's part of a weight, and know which part of the checkpoint's tensor
that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from common.cpu.linear import Linear
from llm_service.layers.linear.layout import laid_out, quantized
from llm_service.layers.linear.placement import Place, Stored, fill, length
from llm_service.layers.linear.quantized_weight import QuantizedWeight
from llm_service.layers.linear.weight_dtype import EXACT, Rounded, narrowed
from llm_service.layers.tensor_parallel import TensorGroup


class AddsToRows(Protocol):
    """Adds to some rows of a product."""

    @property
    def active(self) -> bool:
        """Whether it adds to any row of this step."""
        ...

    def add(self, x: Tensor, out: Tensor, /) -> Tensor:
        """x [n, inputs], out [n, outputs], which is changed in place."""
        ...

    def add_arrays(self, x: np.ndarray, out: np.ndarray, /) -> None:
        """The same for arrays of float32 that lie together."""
        ...


class PackedLinear(Linear):
    """y = x Wᵀ + b, where W stacks parts that the checkpoint keeps apart (q, k and v; gate and up).

    One product over the stack reads the input once and launches one kernel instead of several. `inputs` and `parts` are
    this rank's ranges of the checkpoint's columns and of each part's rows. Rows of all parts are consecutive, unless
    `order` int64 says where each of them goes. A part may be several ranges of the checkpoint's rows. Without `rounds`
    the weight is never rounded, and without `rounds_inputs` its input is not.
    """

    def __init__(
        self,
        inputs: slice,
        parts: Mapping[str, slice | tuple[slice, ...]],
        *,
        bias: bool,
        dtype: torch.dtype,
        order: Tensor | None = None,
        rounds: bool = True,
        rounds_inputs: bool = True,
    ) -> None:
        self.parts = {name: (rows,) if isinstance(rows, slice) else rows for name, rows in parts.items()}
        outputs = sum(length(each) for rows in self.parts.values() for each in rows)
        super().__init__(length(inputs), outputs, bias=bias, dtype=dtype)
        self._inputs = inputs
        self._order = order
        self._rounds, self._rounds_inputs = rounds, rounds_inputs
        self._quantized: dict[str, list[QuantizedWeight]] = {}
        self._missing = {(part, kind) for part in parts for kind, _ in self.named_parameters()}
        self.inputs, self.outputs = length(inputs), outputs
        self.adapters: AddsToRows | None = None

    def forward(self, x: Tensor, activation: nn.Module | None = None) -> Tensor:
        """As `Linear.forward`; adapters add before the activation."""
        if self.adapters is None or not self.adapters.active:
            return super().forward(x, activation)
        out = self.adapters.add(x, super().forward(x))
        return out if activation is None else activation(out)

    def places(self, part: str) -> Tensor:
        """Where the outputs of a part are, int64 [m], in the order of this rank's rows of it."""
        begin, end = self._outputs_of(part)
        return torch.arange(begin, end) if self._order is None else self._order[begin:end]

    def _outputs_of(self, part: str) -> tuple[int, int]:
        """Where this rank's rows of a part begin and end among those of all parts."""
        names = list(self.parts)
        begin = sum(length(each) for name in names[: names.index(part)] for each in self.parts[name])
        return begin, begin + sum(map(length, self.parts[part]))

    def partition(self, part: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's partition of an adapter's two matrices, A [r, all inputs] and B [all outputs, r] of a part."""
        return a[:, self._inputs], torch.cat([b[rows] for rows in self.parts[part]])

    def targets(self, _: str, /) -> dict[str, Place]:
        """See `Placed`."""
        return {f"{part}.{kind}": partial(self._place, part, kind) for part, kind in self._missing}

    def _place(self, part: str, kind: str, stored: Stored) -> None:
        (begin, end), rows, whole = self._outputs_of(part), self.parts[part], getattr(self, kind)
        read = [stored[each, self._inputs] if kind == "weight" else stored[each] for each in rows]
        shape, expected = (sum(each.shape[0] for each in read), *read[0].shape[1:]), (end - begin, *whole.shape[1:])
        if shape != expected:
            raise ValueError(f"{part}.{kind} is {shape}, expected {expected}")
        quantized = [each for each in read if isinstance(each, QuantizedWeight)]
        source = read[0] if len(read) == 1 or quantized else torch.cat(read)
        if quantized:
            self._quantized[part] = quantized
            if self._quantized.keys() == self.parts.keys():
                self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)
        elif self._order is None:
            whole[begin:end].copy_(source)
        else:
            whole[self._order[begin:end].to(whole.device)] = source.to(whole)
        self._missing.discard((part, kind))

    def whole(self) -> bool:
        """Whether all parts have been read."""
        return not self._missing

    def finalize(self, *, rounded: Rounded = EXACT) -> None:
        """As `Linear.finalize`; the weight is rounded first. A quantised one stays as it is."""
        if self.laid_out is not None:
            return
        if not self._quantized:
            int8, inputs = rounded.int8 and self._rounds, rounded.inputs and self._rounds_inputs
            rounded = replace(rounded, int8=int8, inputs=inputs)
            self._replace_weight(laid_out(self.weight.detach(), rounded))
        elif missing := self.parts.keys() - self._quantized.keys():
            raise ValueError(f"{min(missing)} is not quantised, as what it is computed with is")
        else:
            parts = [each.to(self.weight.device) for part in self.parts for each in self._quantized.pop(part)]
            self._replace_weight(quantized(parts, self._order, rounded=rounded))


class RowParallelLinear(PackedLinear):
    """A layer whose outputs are summed over the ranks of a group; the first rank adds the bias."""

    def __init__(
        self,
        inputs: slice,
        parts: Mapping[str, slice | tuple[slice, ...]],
        group: TensorGroup,
        *,
        bias: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(inputs, parts, bias=bias, dtype=dtype)
        self._first = group.rank == 0

    def _place(self, part: str, kind: str, stored: Stored) -> None:
        super()._place(part, kind, stored)
        if kind == "bias" and not self._first:
            assert self.bias is not None, "it has just been read"
            self.bias.zero_()


_AT_ONCE = 4096
"""Rows that are normed together."""


class VocabParallelEmbedding(nn.Module):
    """Token embeddings, split over the ranks by token id, and multiplied by `scale` as their type has it. With a
    `norm_eps` each is normed when it is read, without a weight."""

    def __init__(
        self,
        total: int,
        hidden: int,
        group: TensorGroup,
        dtype: torch.dtype,
        *,
        scale: float | None = None,
        norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self._norm_eps = norm_eps
        self._scale = None if scale is None else torch.tensor(scale, dtype=dtype, device="cpu").item()
        self.partition = group.vocab_partition(total)
        self._group = group
        self._dtype = dtype
        self.weight = nn.Parameter(torch.empty(length(self.partition), hidden, dtype=dtype), requires_grad=False)

    def targets(self, own: str) -> dict[str, Place]:
        """See `Placed`."""
        return {f"{own}.weight": self._fill}

    def _fill(self, stored: Stored) -> None:
        fill(self.weight, stored[self.partition])
        if self._norm_eps is not None:
            for rows in self.weight.split(_AT_ONCE):
                rows.copy_(functional.rms_norm(rows.float(), rows.shape[1:], eps=self._norm_eps))

    def finalize(self) -> None:
        """Called when the weight is final: it is kept in 16 bits if these have all of its numbers."""
        self.weight = nn.Parameter(narrowed(self.weight.detach()), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """int [n] → [n, hidden]."""
        if self._group.size == 1:
            return self._rows(token_ids)
        local = token_ids - self.partition.start
        foreign = (local < 0) | (local >= self.weight.shape[0])
        if not len(self.weight):
            return self._group.sum(self.weight.new_zeros(len(token_ids), self.weight.shape[1], dtype=self._dtype))
        out = self._rows(local.masked_fill(foreign, 0))
        return self._group.sum(out.masked_fill(foreign.unsqueeze(1), 0.0))

    def _rows(self, token_ids: Tensor) -> Tensor:
        rows = functional.embedding(token_ids, self.weight).to(self._dtype)
        return rows if self._scale is None else rows.mul_(self._scale)
