"""Layers that hold this rank's part of a weight, and know which part of the checkpoint's tensor that is.

So the loader reads only what a rank needs, and knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from common.cpu.linear import BlockedWeight, LaidOut, Linear
from llm_service.layers.cpu import selection
from llm_service.layers.group import TensorGroup
from llm_service.layers.quantized_weight import Number, QuantizedWeight, StackedWeight
from llm_service.layers.weight_dtype import EXACT, Rounded, narrowed


class Stored(Protocol):
    """A tensor in a file: indexing reads that part alone. A quantised weight comes as `QuantizedWeight`."""

    def __getitem__(self, index: Any) -> Any: ...

    def get_shape(self) -> list[int]: ...


@runtime_checkable
class StoredStack(Stored, Protocol):
    """Weights of several experts in one tensor of a file, quantised, which are read one by one."""

    def of_expert(self, number: int, *, inputs_first: bool) -> Stored:
        """One expert's, [outputs, inputs], whichever come first in the file. Raises ValueError where that does not fit
        how they are stored."""
        ...


Place = Callable[[Stored], None]
"""Reads what this rank needs of a stored tensor; raises ValueError on a wrong shape."""


def elsewhere(_: Stored) -> None:
    """The `Place` of a tensor of which other ranks need all: nothing is read."""


@runtime_checkable
class Placed(Protocol):
    """A module that knows which of a checkpoint's tensors are its weights, and which part of them this rank holds."""

    def targets(self, own: str, /) -> dict[str, Place]:
        """The tensors that it needs, by their names in the module that has this one as `own`."""
        ...


def path_within(path: str, attribute: str, child: nn.Module) -> str:
    """What the names of a child's tensors begin with in a checkpoint, of one in a module whose names begin with `path`:
    they stand below the child's own, or beside it where it is stored as nothing.

    >>> path_within("layers.0.", "mlp", nn.Module())
    'layers.0.mlp.'
    """
    own = getattr(child, "stored_as", attribute)
    return f"{path}{own}." if own else path


@runtime_checkable
class Finalized(Protocol):
    """A module whose weights get another form once all have been read."""

    def whole(self) -> bool:
        """Whether all have been."""
        ...

    def finalize(self, *, rounded: Rounded = EXACT) -> None:
        """Called when they are final, to be rounded."""
        ...


class AddsToRows(Protocol):
    """What adds to some rows of a product."""

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

    One product over the stack reads the input once and starts one kernel in place of several. `inputs` and `parts` are
    this rank's ranges of the checkpoint's columns and of each part's rows. The rows of all parts come one after the
    other, unless `order` int64 says where each of them goes. A part may be several ranges of the checkpoint's rows.
    Without `rounds` the weight is what the checkpoint has, whatever others are rounded to, and without `rounds_inputs`
    so is what it is multiplied with.
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
        """As `Linear.forward`; what adapters add comes before the activation."""
        if self.adapters is None or not self.adapters.active:
            return super().forward(x, activation)
        out = self.adapters.add(x, super().forward(x))
        return out if activation is None else activation(out)

    def places(self, part: str) -> Tensor:
        """Where the outputs of a part are, int64 [m], in the order of this rank's rows of it."""
        names = list(self.parts)
        begin = sum(length(each) for name in names[: names.index(part)] for each in self.parts[name])
        end = begin + sum(map(length, self.parts[part]))
        return torch.arange(begin, end) if self._order is None else self._order[begin:end]

    def partition(self, part: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's partition of an adapter's two matrices, A [r, all inputs] and B [all outputs, r] of a part."""
        return a[:, self._inputs], torch.cat([b[rows] for rows in self.parts[part]])

    def targets(self, _: str, /) -> dict[str, Place]:
        """See `Placed`."""
        return {f"{part}.{kind}": partial(self._place, part, kind) for part, kind in self._missing}

    def _place(self, part: str, kind: str, stored: Stored) -> None:
        names, rows = list(self.parts), self.parts[part]
        begin = sum(length(each) for name in names[: names.index(part)] for each in self.parts[name])
        end, whole = begin + sum(map(length, rows)), getattr(self, kind)
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


class SummedLinear(PackedLinear):
    """One whose outputs are summed over the ranks of a group: the bias is the first one's."""

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


class VocabularyEmbedding(nn.Module):
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
        """Called when the weight is final: it is kept in 16 bits where they have all of its numbers."""
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


def laid_out(weight: Tensor, rounded: Rounded = EXACT) -> LaidOut | None:
    """A weight that is final in the form that is computed with fastest here; None where that is as it is. It may be
    rounded to 8 bits on any device, to bfloat16 where `selection.computes_bfloat16`."""
    if weight.device.type == "cpu" and selection.allows_panels():
        from llm_service.layers.cpu.pair_panels import PairPanels  # numba takes its time
        from llm_service.layers.cpu.panels import PanelWeight

        panels: LaidOut | None
        if rounded.int8:
            panels = None if rounded.bfloat16 or rounded.inputs else PanelWeight.rounded(weight)
        else:
            panels = (PairPanels if rounded.bfloat16 else PanelWeight).of(weight)
        if panels is not None:
            return panels
    if rounded.int8:
        return quantized([QuantizedWeight.rounded(weight, inputs=rounded.inputs)], rounded=rounded)
    return BlockedWeight.of(weight)


def quantized(parts: Sequence[QuantizedWeight], order: Tensor | None = None, *, rounded: Rounded = EXACT) -> LaidOut:
    """Weights over the same inputs, one below the other, in the form that is computed with fastest here; `order` int64
    [outputs] says where each of their outputs goes; of `rounded`, `bfloat16` counts. Raises ValueError for what is not
    a weight."""
    each: Sequence[LaidOut] = parts
    if parts[0].codes.device.type == "cpu" and (plain := _as_plain(parts, order, rounded)) is not None:
        return plain
    if (form := _form(parts[0].codes.device, rounded)) is not None:
        alike = len({part.input_scale for part in parts}) == 1  # else a row is rounded for each of them
        if alike and (together := form(parts, order)):
            return together
        each = [form([part], None) or part for part in parts]
    places = None if order is None else order.argsort().to(parts[0].codes.device)
    return each[0] if len(each) == 1 and places is None else StackedWeight(each, places)


def _as_plain(parts: Sequence[QuantizedWeight], order: Tensor | None, rounded: Rounded) -> LaidOut | None:
    """The weights that they stand for, where those are what our kernels for CPUs compute with; else None."""
    if not selection.allows_panels() or not all(part.number in (Number.NF4, Number.FP4) for part in parts):
        return None
    from llm_service.layers.cpu.pair_panels import PairPanels  # numba takes its time
    from llm_service.layers.cpu.panels import PanelWeight

    wide = torch.cat([part.wide() for part in parts])
    wide = wide if order is None else wide[order.argsort()]
    return (PairPanels.of(wide) if rounded.bfloat16 else None) or PanelWeight.of(wide)


def _form(
    device: torch.device, rounded: Rounded
) -> Callable[[Sequence[QuantizedWeight], Tensor | None], LaidOut | None] | None:
    """What lays quantised weights out for a device, if anything does."""
    if device.type == "cuda":
        from llm_service.layers.gpu.int8_weight import Int8Weight  # not everywhere is a Triton
        from llm_service.layers.gpu.quantized_weight import GpuWeight

        return lambda parts, order: Int8Weight.of(parts, order) or GpuWeight.of(parts, order)
    if device.type == "cpu" and selection.allows_panels():
        from llm_service.layers.cpu.quad_panels import QuadPanels  # numba takes its time
        from llm_service.layers.cpu.quantized_panels import QuantizedPanels

        wide = partial(QuantizedPanels.of, bfloat16=rounded.bfloat16)
        return lambda parts, order: QuadPanels.of(parts, order) or wide(parts, order)
    return None


def fill(parameter: Tensor, source: Tensor | QuantizedWeight) -> None:
    """Copies a weight, in its long form; raises ValueError where it has another shape."""
    if isinstance(source, QuantizedWeight):
        source = source.wide()
    if parameter.shape != source.shape:
        raise ValueError(f"it is {tuple(source.shape)}, expected {tuple(parameter.shape)}")
    parameter.copy_(source)


def length(part: slice) -> int:
    """How many there are."""
    return int(part.stop - part.start)
