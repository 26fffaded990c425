"""Weights with a number in each byte, or two of e2m1 in one, and scales for groups of them: how a rank's part of one is
read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llm_service.layers.linear.placement import Stored
from llm_service.layers.linear.quantized_weight import Number, QuantizedWeight


class SlicedWeight:
    """A quantised weight in a file. Indexing by a slice of outputs, or by slices of outputs and inputs, reads that part
    of it."""

    shape: tuple[int, int]

    def get_shape(self) -> list[int]:
        """[outputs, inputs]."""
        return list(self.shape)

    def __getitem__(self, index: Any) -> Any:
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        begin, end, _ = rows.indices(self.shape[0])
        first, last, _ = columns.indices(self.shape[1])
        return self.read(begin, end, first, last)

    def read(self, begin: int, end: int, first: int, last: int) -> QuantizedWeight | Tensor:
        """Outputs [begin, end), inputs [first, last)."""
        raise NotImplementedError


class EightBits(SlicedWeight):
    """One number per byte. There is one scale, and one zero if any, for all numbers, for each output, for some inputs
    of each output, or for each `block` of outputs and inputs. `input_scale` as in `QuantizedWeight`."""

    def __init__(
        self,
        number: Number,
        weight: Stored,
        scale: Stored,
        zero: Stored | None = None,
        *,
        block: tuple[int, int] | None = None,
        rounds_inputs: Number | None = None,
        input_scale: float = 0.0,
    ) -> None:
        self._number, self._weight, self._scale = number, weight, grid_of(scale)
        self._zero = 0 if zero is None else grid_of(zero, whole=True)
        self._rounds_inputs, self._input_scale = rounds_inputs is number, input_scale
        self.shape = two_sides(weight)
        self._rows, self._columns = _group(self.shape, tuple(self._scale.shape), block)

    def read(self, begin: int, end: int, first: int, last: int) -> QuantizedWeight:
        """Outputs [begin, end), inputs [first, last)."""
        rows, columns = cover(begin, end, self._rows), cover(first, last, self._columns)
        return QuantizedWeight(
            self._number,
            self._weight[begin:end, first:last].contiguous().view(torch.uint8),
            last - first,
            self._scale[rows, columns].contiguous(),
            self._zero[rows, columns].contiguous() if isinstance(self._zero, Tensor) else self._zero,
            rows=self._rows,
            columns=self._columns,
            first=(begin % self._rows, first % self._columns),
            rounds_inputs=self._rounds_inputs,
            input_scale=self._input_scale,
        )


class PairsOfFloats(SlicedWeight):
    """Two e2m1 in a byte, the first in its lower half, and a scale for `group` of them; `unit` multiplies all, and
    `divisor` divides."""

    def __init__(self, codes: Stored, scale: Stored, group: int, *, unit: float = 1.0, divisor: float = 1.0) -> None:
        self._codes, self._scale, self._group, self._unit, self._divisor = codes, scale, group, unit, divisor
        outputs, half = two_sides(codes)
        self.shape = (outputs, 2 * half)
        if two_sides(scale) != (outputs, 2 * half // group):
            raise ValueError(f"its scales are {two_sides(scale)}")

    def read(self, begin: int, end: int, first: int, last: int) -> QuantizedWeight:
        """Outputs [begin, end), inputs [first, last); `first` is even."""
        if first % 2 or last % 2:
            raise ValueError("a rank's part begins or ends inside a byte")
        return QuantizedWeight(
            Number.E2M1,
            self._codes[begin:end, first // 2 : last // 2].contiguous(),
            last - first,
            self._scale[begin:end, cover(first, last, self._group)].contiguous(),
            columns=self._group,
            first=(0, first % self._group),
            unit=self._unit,
            divisor=self._divisor,
        )


class PowersOfTwo:
    """Scales stored as e8m0 bytes: exponents plus 127. They are returned in bfloat16, which represents them all."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored

    def get_shape(self) -> list[int]:
        """See `Stored`."""
        return self._stored.get_shape()

    def __getitem__(self, index: Any) -> Tensor:
        """Raises ValueError for the code that is not a number."""
        powers: Tensor = self._stored[index].view(torch.float8_e8m0fnu).to(torch.bfloat16)
        if powers.isnan().any():
            raise ValueError("one of its scales is not a number")
        return powers


def cover(begin: int, end: int, size: int) -> slice:
    """The groups of `size` that [begin, end) touches."""
    return slice(begin // size, -(-end // size))


def grid_of(stored: Stored, *, whole: bool = False) -> Tensor:
    """Scales [groups of outputs, groups of inputs]. Stored ones may have fewer dimensions if there is one, or one for
    each output, and further dimensions of 1 if they are for blocks. With `whole` they may be integers. Raises
    ValueError for other types."""
    tensor: Tensor = stored[:] if stored.get_shape() else stored[...]
    if not whole and not tensor.is_floating_point():
        raise ValueError(f"its scales are {str(tensor.dtype).removeprefix('torch.')}")
    if tensor.dim() == 4 and tensor.shape[1] == tensor.shape[3] == 1:
        return tensor[:, 0, :, 0]
    return tensor.reshape(-1, 1) if tensor.dim() < 2 else tensor


def only_number(stored: Stored) -> float:
    """The value of a tensor with one number. Raises ValueError if it has more."""
    tensor: Tensor = stored[:] if stored.get_shape() else stored[...]
    if tensor.numel() != 1:
        raise ValueError(f"it has {tensor.numel()} scales of all of it")
    return float(tensor)


def _group(shape: tuple[int, int], grid: tuple[int, ...], block: tuple[int, int] | None) -> tuple[int, int]:
    """Outputs and inputs of a group, if a weight of this shape has a `grid` of scales."""
    outputs, inputs = shape
    if block is not None and grid == (-(-outputs // block[0]), -(-inputs // block[1])):
        return block
    if grid == (1, 1):
        return outputs, inputs
    if len(grid) == 2 and grid[0] == outputs and grid[1] and inputs % grid[1] == 0:
        return 1, inputs // grid[1]
    raise ValueError(f"{grid} scales are for neither blocks nor outputs of {shape}")


def two_sides(stored: Stored) -> tuple[int, int]:
    """The two dimensions, such as (outputs, inputs). Raises ValueError if there are more or fewer."""
    shape = stored.get_shape()
    if len(shape) != 2:
        raise ValueError(f"one of its tensors has {len(shape)} dimensions")
    return int(shape[0]), int(shape[1])
