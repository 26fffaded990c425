"""A weight as in a quantised checkpoint: numbers of 8 or 4 bits, and scales for groups of them.

It stays like this in memory. A product dequantises some outputs at a time, so that only these exist in a longer type.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from common.checkpoints.bitsandbytes import LEVELS
from common.cpu.linear import LaidOut

_AT_ONCE = 1 << 20
"""Numbers dequantised at a time: as float32 they take 4 MiB, which fits into a processor's caches."""
_NO_NUMBER, _HIGHEST = 0x7F, 127
"""Of e4m3, but for its sign; of eight bits with one."""
STEPS = 127.5
"""Of a row's largest number, how many steps it is divided into: as compressed-tensors has it, so that as many are above
zero as below."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Number(enum.Enum):
    """The encoding of a number. With 4 bits there are two in a byte, the first in its lower half. The last two are
    bitsandbytes' own."""

    E4M3 = "e4m3"
    INT8 = "int8"
    UINT8 = "uint8"
    UINT4 = "uint4"
    E2M1 = "e2m1"
    NF4 = "nf4"
    FP4 = "fp4"

    @property
    def bits(self) -> int:
        """Of one."""
        return 8 if self in (Number.E4M3, Number.INT8, Number.UINT8) else 4


@cache
def table(number: Number) -> Tensor:
    """float32 [256, 1 or 2]: the numbers of each byte."""
    byte = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    halves = torch.cat((byte & 15, byte >> 4), dim=1)
    match number:
        case Number.E4M3:
            return byte.view(torch.float8_e4m3fn).float()
        case Number.INT8:
            return byte.view(torch.int8).float()
        case Number.UINT8:
            return byte.float()
        case Number.UINT4:
            return halves.float()
        case Number.E2M1:
            return torch.tensor([*_E2M1, *(-each for each in _E2M1)])[halves.int()]
        case Number.NF4 | Number.FP4:
            return torch.tensor(LEVELS[number.value])[halves.int()]


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """w[o, i] = (number[o, i] − zero) · scale · unit / divisor, with the zero and scale of the group of o and i.

    `codes` uint8 are the numbers' bits, [outputs, inputs], or [outputs, ⌈inputs / 2⌉] with two in a byte. Groups have
    `rows` outputs by `columns` inputs; `first` is the position of the first output and input in their group, which is
    not 0 if a rank has a part of a weight. `column_groups` int32 [inputs] is the group of each input if inputs were
    reordered. `scale` and `zero` are [groups of outputs, groups of inputs], the first in the checkpoint's type; a
    common zero is a number. `rounds_inputs`: it is meant for inputs with as few bits, rounded dynamically, or, with an
    `input_scale`, to multiples of that. `stored_as`: products of numbers and scales are rounded to this type, as in the
    library that made it.
    """

    number: Number
    codes: Tensor
    inputs: int
    scale: Tensor
    zero: Tensor | int = 0
    rows: int = 1
    columns: int = 1
    first: tuple[int, int] = (0, 0)
    column_groups: Tensor | None = None
    unit: float = 1.0
    divisor: float = 1.0
    rounds_inputs: bool = False
    input_scale: float = 0.0
    stored_as: torch.dtype | None = None

    @classmethod
    def rounded(cls, weight: Tensor, *, inputs: bool = False) -> QuantizedWeight:
        """A weight [outputs, inputs] rounded to 8 bits with a scale for each output: its largest number becomes ±127.
        With `inputs` it is to be multiplied with rounded inputs as well."""
        scale = weight.abs().amax(1).float().clamp(min=torch.finfo(torch.float32).tiny) / _HIGHEST
        values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        for part, whole, factor in zip(values.split(1024), weight.split(1024), scale.split(1024), strict=True):
            part.copy_((whole.float() / factor.unsqueeze(1)).round_())
        width = weight.shape[1]
        codes = values.view(torch.uint8)
        return cls(Number.INT8, codes, width, scale.unsqueeze(1), columns=width, rounds_inputs=inputs)

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return len(self.codes), self.inputs

    @property
    def nbytes(self) -> int:
        """Bytes of all that it holds."""
        held = (self.codes, self.scale, self.zero, self.column_groups)
        return sum(each.nbytes for each in held if isinstance(each, Tensor))

    @property
    def cuts_groups(self) -> bool:
        """Whether its inputs begin or end within one of several groups."""
        if self.column_groups is not None or self.scale.shape[1] == 1:
            return False
        return bool(self.first[1] or self.inputs % self.columns)

    def to(self, device: torch.device) -> QuantizedWeight:
        """The same on a device."""
        return replace(
            self,
            codes=self.codes.to(device),
            scale=self.scale.to(device),
            zero=self.zero.to(device) if isinstance(self.zero, Tensor) else self.zero,
            column_groups=None if self.column_groups is None else self.column_groups.to(device),
        )

    def wide(self, begin: int = 0, end: int | None = None) -> Tensor:
        """float32 [end − begin, inputs]: outputs from `begin` on. Each number is rounded once, in its product."""
        codes = self.codes[begin:end]
        numbers = self._numbers(codes)
        scale = self.of_outputs(self.scale, begin, end).float() * self.unit / self.divisor
        zero = self.of_outputs(self.zero, begin, end).float() if isinstance(self.zero, Tensor) else float(self.zero)
        if self._is_even():
            grouped = numbers.view(len(codes), -1, self.columns)
            grouped.sub_(zero.unsqueeze(2) if isinstance(zero, Tensor) else zero).mul_(scale.unsqueeze(2))
        else:
            of_input = self.groups_of_inputs()
            numbers.sub_(zero[:, of_input] if isinstance(zero, Tensor) else zero).mul_(scale[:, of_input])
        return numbers if self.stored_as is None else numbers.to(self.stored_as).float()

    def _is_even(self) -> bool:
        """Groups of inputs are whole, and in order."""
        return self.column_groups is None and not self.first[1] and self.inputs == self.scale.shape[1] * self.columns

    def of_outputs(self, grid: Tensor, begin: int = 0, end: int | None = None) -> Tensor:
        """[groups of outputs, groups of inputs] → [end − begin, groups of inputs]: the values of the outputs'
        groups."""
        outputs = torch.arange(len(self.codes), device=self.codes.device)[begin:end]
        return grid[(outputs + self.first[0]) // self.rows]

    def groups_of_inputs(self) -> Tensor:
        """int [inputs]: each one's group."""
        if self.column_groups is not None:
            return self.column_groups
        return (torch.arange(self.inputs, device=self.codes.device) + self.first[1]) // self.columns

    def _numbers(self, codes: Tensor) -> Tensor:
        """float32 [n, inputs], a tensor of its own."""
        return table(self.number).to(codes.device)[codes.int()].flatten(1)[:, : self.inputs]

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x […, inputs] → x Wᵀ + b, […, outputs], in the type of x."""
        rows = x.flatten(0, -2)
        out = rows.new_empty(len(rows), len(self.codes))
        step = max(1, _AT_ONCE // max(1, self.inputs))
        for begin in range(0, len(self.codes), step):
            end = min(len(self.codes), begin + step)
            out[:, begin:end] = functional.linear(rows, self.wide(begin, end).to(x.dtype))
        return (out if bias is None else out.add_(bias)).view(*x.shape[:-1], len(self.codes))


def rounded_rows(x: Tensor, scale: float = 0.0) -> tuple[Tensor, Tensor]:
    """x float32 [m, inputs] → numbers int8 [m, inputs], and their scales [m]: the given one or, if that is 0, one for
    each row, which is NaN if the row is not finite."""
    largest = x.abs().amax(1) if x.shape[1] else x.new_zeros(len(x))
    own = torch.full_like(largest, scale) if scale else torch.where(largest > 0, largest / STEPS, 1.0)
    scales = torch.where(largest.isfinite(), own, torch.nan)
    return (x / scales.unsqueeze(1)).round_().clamp_(-128, 127).nan_to_num_(0.0).to(torch.int8), scales


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """Weights that are quantised alike, stacked: w[o, i] = (number[o, i] − zero) · scale · unit[o], with the zero and
    the scale of output o in the group of i.

    `codes` are as in `QuantizedWeight`. `scale` [groups, outputs] is in the checkpoint's type. `zero` int32 is [groups,
    outputs], or [1, outputs] if all groups of an output have the same, or [0, outputs] without zeros. `unit` is float32
    [outputs]. Inputs, in the order `order` int64 [inputs] if given, are sorted by group: `ends` int32 [groups] is the
    end of each. `rounds_inputs` as there.
    """

    number: Number
    codes: Tensor
    inputs: int
    scale: Tensor
    zero: Tensor
    unit: Tensor
    ends: Tensor
    order: Tensor | None = None
    rounds_inputs: bool = False

    @classmethod
    def of(cls, parts: Sequence[QuantizedWeight], order: Tensor | None = None) -> GroupedWeight | None:
        """Weights over the same inputs; `order` int64 [outputs] says where each of their outputs goes. None if they are
        not quantised alike. Raises ValueError for an invalid weight."""
        first = parts[0]
        if not all(_alike(each, first) for each in parts):
            return None
        codes = torch.cat([each.codes for each in parts])
        if first.number is Number.E4M3 and ((codes & _NO_NUMBER) == _NO_NUMBER).any():
            raise ValueError("one of its weights is not a number")
        groups, inputs = _order(first)
        counts = torch.bincount(groups, minlength=first.scale.shape[1])
        present = counts.nonzero().squeeze(1)
        scale = torch.cat([each.of_outputs(each.scale)[:, present] for each in parts])
        zero = _zeros(parts)
        zero = zero[:, present] if zero.shape[1] > 1 else zero
        unit = torch.cat([torch.full((len(each.codes),), each.unit / each.divisor) for each in parts]).to(codes.device)
        if len(present) == 1 and not zero.shape[1]:  # sums of few rows and of many are then the same to the bit
            unit, scale = unit * scale[:, 0].float(), torch.ones_like(scale, dtype=torch.float32)
        back = slice(None) if order is None else order.argsort().to(codes.device)
        return cls(
            first.number,
            codes[back],
            first.inputs,
            scale[back].T.contiguous(),
            zero[back].T.contiguous(),
            unit[back],
            counts[present].cumsum(0).int(),
            inputs,
            all(each.rounds_inputs for each in parts),
        )

    @classmethod
    def of_bytes(cls, parts: Sequence[QuantizedWeight], order: Tensor | None, most_inputs: int) -> GroupedWeight | None:
        """The same of weights that are multiplied as whole numbers of 8 bits: with inputs of as many, no more than
        that, a scale for each output and no zeros. None for any others."""
        if not all(each.rounds_inputs and each.number is Number.INT8 for each in parts):
            return None
        if not 0 < parts[0].inputs <= most_inputs or len({each.input_scale for each in parts}) > 1:
            return None
        whole = cls.of(parts, order)
        return whole if whole is not None and len(whole.ends) == 1 and not len(whole.zero) else None


def _alike(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    """Whether two weights are in numbers of one type, and of groups of the same inputs."""
    return (
        one.number is other.number
        and one.inputs == other.inputs
        and one.scale.dtype == other.scale.dtype
        and one.scale.shape[1] == other.scale.shape[1]
        and torch.equal(one.groups_of_inputs(), other.groups_of_inputs())
    )


def _order(weight: QuantizedWeight) -> tuple[Tensor, Tensor | None]:
    """The group of each input, and the order that sorts inputs by group; None if they are sorted."""
    groups = weight.groups_of_inputs().long()
    ordered = groups.sort(stable=True)
    return groups, None if torch.equal(ordered.values, groups) else ordered.indices


def _zeros(parts: Sequence[QuantizedWeight]) -> Tensor:
    """int [outputs, groups], [outputs, 1] if an output's groups have one zero, [outputs, 0] without zeros."""
    found = [
        each.of_outputs(each.zero)
        if isinstance(each.zero, Tensor)
        else torch.full((len(each.codes), 1), each.zero, device=each.codes.device)
        for each in parts
    ]
    most = max(each.shape[1] for each in found)
    zeros = torch.cat([each.int().expand(-1, most) for each in found])
    return zeros if zeros.any() else zeros[:, :0]


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """Weights over the same inputs, stacked: q, k and v of one layer may be quantised differently. `places` int64
    [outputs] says where each of the stack's outputs goes, None: they are in order."""

    parts: Sequence[LaidOut]
    places: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all that it holds."""
        return sum(part.nbytes for part in self.parts)

    @property
    def kernels(self) -> frozenset[str]:
        """See `NumbaCompiled`."""
        return frozenset[str]().union(*(getattr(part, "kernels", ()) for part in self.parts))

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x […, inputs] → x Wᵀ + b, […, outputs of all parts], in the type of x."""
        out = torch.cat([part.product(x) for part in self.parts], dim=-1)
        out = out if self.places is None else out[..., self.places]
        return out if bias is None else out.add_(bias)
