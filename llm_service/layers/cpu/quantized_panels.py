"""Quantised weights on a CPU in panels of 64 outputs, which our kernels multiply without dequantising them in
memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from common.cpu.arrays import lined
from common.cpu.jit import Array
from common.cpu.weight_panels import WIDTH
from llm_service.layers.cpu import quantized_kernel, quantized_pairs, quantized_tiles, selection
from llm_service.layers.cpu.quantized_kernel import BFLOAT16, E2M1, E4M3, FLOAT16, FLOAT32, INT8, NIBBLES
from llm_service.layers.linear.quantized_weight import GroupedWeight, Number, QuantizedWeight, table

_AT_ONCE = 64
"""Panels that are laid out, or dequantised by torch, at a time, so that this takes little memory beside the
weight's."""
_LINE = 16
"""Bytes of two numbers each: the lower halves are sixteen outputs, the upper halves the next sixteen."""
_FORMS = {
    Number.E4M3: E4M3,
    Number.INT8: INT8,
    Number.UINT8: INT8,
    Number.UINT4: NIBBLES,
    Number.E2M1: E2M1,
}
_SCALES = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16, torch.float8_e4m3fn: E4M3}
"""The kernel's names for the dtypes of numbers and scales."""
_SHARE = {Number.E4M3: 2.0**-8, Number.E2M1: 2.0**-14}
"""The factor by which the kernel reads such numbers, since a float16's exponent has another bias."""
_SIGN = 0x80
"""Subtracted from unsigned bytes, to make them signed."""


@dataclass(frozen=True, slots=True)
class QuantizedPanels:
    """w[o, order[i]] = (number[o, i] − zero) · scale · unit[o], with the zero and the scale of output o in the group
    that i is in; group g ends before input `ends[g]`.

    `codes` uint8 [⌈outputs / 64⌉, inputs, 64 or 32] are the bits of a panel's numbers for each input, of those with 8
    and with 4; unsigned bytes are less by 128 here, and signed. `scale` uint8 [groups, …] are the bytes of scales, as
    the checkpoint has them, for all outputs of a group; `kind` says their type. `zero` int8 is [groups, outputs], or
    [1, outputs] where all groups have the same, or [0, outputs] where there is none. `unit` float32 [outputs]; ends and
    order are int32 [groups] and [inputs], or [0] where inputs are in order. All but `outputs` count outputs in whole
    panels. `kernel` multiplies them.
    """

    number: Number
    outputs: int
    codes: Array
    scale: Array
    kind: int
    zero: Array
    unit: Array
    ends: Array
    order: Array
    kernel: ModuleType

    @classmethod
    def of(
        cls, parts: Sequence[QuantizedWeight], order: Tensor | None = None, *, bfloat16: bool = False
    ) -> QuantizedPanels | None:
        """Concatenates the outputs of weights over the same inputs, in panels; `order` int64 [outputs] says where each
        output goes. With `bfloat16`, rows are rounded to bfloat16 if products are faster that way. None if the weights
        are not quantised alike, or the kernel does not run here. Raises ValueError if a weight is not a number."""
        if not _fits(parts[0]) or (whole := GroupedWeight.of(parts, order)) is None:
            return None
        unit = whole.unit / _SHARE.get(whole.number, 1.0)
        if whole.scale.dtype == torch.float8_e4m3fn:
            unit /= _SHARE[Number.E4M3]
        zero = whole.zero - _SIGN if whole.number is Number.UINT8 and len(whole.zero) else whole.zero
        if whole.number is Number.UINT8 and not len(zero):
            zero = torch.full((1, len(unit)), -_SIGN)
        ends = whole.ends.numpy()
        return cls(
            whole.number,
            len(whole.codes),
            _panels(whole.number, whole.codes, whole.inputs, whole.order),
            _in_panels(whole.scale).view(torch.uint8).numpy(),
            _SCALES[whole.scale.dtype],
            _in_panels(zero if zero.any() else zero[:0]).to(torch.int8).numpy(),
            _in_panels(unit.unsqueeze(0)).numpy()[0],
            ends,
            (torch.empty(0, dtype=torch.int32) if whole.order is None else whole.order.int()).numpy(),
            _kernel_of(ends, bfloat16=bfloat16),
        )

    @property
    def kernels(self) -> frozenset[str]:
        """See `NumbaCompiled`."""
        return frozenset({f"{self.kernel.__name__}:product"})

    @property
    def nbytes(self) -> int:
        """Bytes of all that it holds."""
        arrays = (self.codes, self.scale, self.zero, self.unit, self.ends, self.order)
        return sum(each.nbytes for each in arrays)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x […, inputs] → x Wᵀ + b, […, outputs], in the type of x."""
        rows = x.reshape(-1, x.shape[-1]).float()
        wide = None if bias is None else bias.float()
        if selection.is_numba():
            out = torch.from_numpy(self.array_product(wide)(rows.numpy()))
        else:
            out = self._by_torch(rows, wide)
        return out.to(x.dtype).view(*x.shape[:-1], self.outputs)

    def array_product(self, bias: Tensor | None = None) -> Callable[[Array], Array]:
        """The product of arrays, float32 [m, inputs] → [m, outputs]; ValueError for rows that do not fit."""
        weight = (self.codes, _FORMS[self.number], self.scale, self.kind, self.zero, self.unit)
        added = None if bias is None else bias.numpy()
        groups = (self.ends, self.order)
        return partial(self.kernel.product, weight=weight, groups=groups, bias=added, outputs=self.outputs)

    def wide(self, first: int = 0, last: int | None = None) -> Tensor:
        """float32 [outputs, inputs] of some panels, from one on up to another."""
        codes = torch.from_numpy(self.codes[first:last])
        count, inputs = codes.shape[:2]
        numbers = table(Number.INT8 if self.number is Number.UINT8 else self.number)[codes.int()].squeeze(3)
        if numbers.dim() == 4:  # [panels, inputs, bytes, halves]
            numbers = numbers.unflatten(2, (-1, _LINE)).transpose(3, 4).flatten(2)
        numbers = numbers.transpose(1, 2).reshape(count * WIDTH, inputs) * _SHARE.get(self.number, 1.0)
        part = slice(first * WIDTH, first * WIDTH + len(numbers))
        lengths = torch.from_numpy(np.diff(self.ends, prepend=0))

        def of_inputs(constants: Tensor) -> Tensor:
            return constants[:, part].float().T.repeat_interleave(lengths, 1)

        if len(self.zero):
            numbers -= of_inputs(torch.from_numpy(self.zero).expand(len(self.ends), -1))
        (dtype,) = (each for each, kind in _SCALES.items() if kind == self.kind)
        numbers *= of_inputs(torch.from_numpy(self.scale).view(dtype))
        numbers *= _SHARE[Number.E4M3] if self.kind == E4M3 else 1.0
        numbers *= torch.from_numpy(self.unit)[part].unsqueeze(1)
        if len(self.order):
            numbers = numbers[:, torch.from_numpy(self.order).argsort()]
        return numbers[: self.outputs - first * WIDTH]

    def _by_torch(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """The product while our kernel is not compiled: some panels at a time are dequantised to float32, for each
        product anew."""
        every = [self.wide(first, first + _AT_ONCE) for first in range(0, len(self.codes), _AT_ONCE)]
        out = torch.cat([functional.linear(rows, each) for each in every], dim=1)
        return out if bias is None else out + bias


def _fits(weight: QuantizedWeight) -> bool:
    """Whether there is a kernel for it on this processor."""
    here = weight.codes.device.type == "cpu" and selection.fused_vectors() and selection.allows_panels()
    return here and weight.number in _FORMS


def _kernel_of(ends: Array, *, bfloat16: bool) -> ModuleType:
    """The fastest for groups with these ends; with `bfloat16` also those that round rows to it, which all numbers are,
    and multiply pairs of inputs, by tiles if there are any."""
    if not (bfloat16 and selection.computes_bfloat16() and quantized_pairs.fits(ends)):
        return quantized_kernel
    return quantized_tiles if selection.computes_tiles() and quantized_tiles.fits(ends) else quantized_pairs


def _in_panels(constants: Tensor) -> Tensor:
    """[groups, outputs], in whole panels."""
    padded = constants.new_zeros(len(constants), -(-constants.shape[1] // WIDTH) * WIDTH)
    padded[:, : constants.shape[1]] = constants
    return padded


def _panels(number: Number, codes: Tensor, inputs: int, order: Tensor | None) -> Array:
    """Codes as in `QuantizedWeight` → as in `QuantizedPanels`."""
    packed = number in (Number.UINT4, Number.E2M1)
    out = lined((-(-len(codes) // WIDTH), inputs, WIDTH // 2 if packed else WIDTH), np.uint8)
    for part, rows in zip(torch.from_numpy(out).split(_AT_ONCE), codes.split(_AT_ONCE * WIDTH), strict=True):
        numbers = torch.stack((rows & 15, rows >> 4), dim=2).flatten(1)[:, :inputs] if packed else rows
        numbers = numbers if order is None else numbers[:, order]
        padded = numbers.new_zeros(len(part) * WIDTH, inputs)
        padded[: len(rows)] = numbers ^ _SIGN if number is Number.UINT8 else numbers
        panels = padded.view(len(part), WIDTH, inputs).transpose(1, 2)
        if packed:
            low, high = panels.unflatten(2, (-1, 2, _LINE)).unbind(3)
            panels = (low | (high << 4)).flatten(2)
        part.copy_(panels)
    return out
