"""Quantised weights on a GPU: they stay quantised in memory, and are dequantised in the kernels that multiply with
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
from torch import Tensor
from torch.nn import functional

from common.checkpoints.bitsandbytes import LEVELS
from llm_service.layers.gpu import quantized_kernel as kernels
from llm_service.layers.gpu.kernel_trial import gives
from llm_service.layers.gpu.launch import Launch, splits_of
from llm_service.layers.gpu.scaled_weight import ScaledExperts, ScaledWeight
from llm_service.layers.linear.quantized_weight import GroupedWeight, Number, QuantizedWeight

_MANY = 256
"""From so many rows on, a weight is dequantised in memory once for all of them, because transformers' product is then
faster."""
_MANY_EACH = 64
"""From so many rows per expert on, on average, its product is bound by arithmetic."""
_TRIED_ROWS, _TRIED_OUTPUTS = (4, 40, 200), 1024
"""Of a trial: rows for each kind of launch, and how many of their outputs are compared."""
_APART = 0.02
"""How far products may be from those of the widened weight, by their length: they are rounded to bfloat16."""
_AT_ONCE, _OF_EXPERTS_AT_ONCE = 1 << 25, 1 << 26
"""Numbers that are widened at a time for many rows, and for rows of experts."""
_WIDEN = 32, 128
"""Outputs and inputs that one program widens."""
_PACKED = Number.UINT4, Number.E2M1, Number.NF4, Number.FP4
_FORMS = {
    Number.INT8: kernels.INT8.value,
    Number.UINT8: kernels.UINT8.value,
    Number.E4M3: kernels.E4M3.value,
    Number.UINT4: kernels.UINT4.value,
    Number.E2M1: kernels.E2M1.value,
    Number.NF4: kernels.LEVELS.value,
    Number.FP4: kernels.LEVELS.value,
}
_SHARE = {Number.E4M3: 2.0**-8, Number.E2M1: 2.0**-14}
"""The factor by which the kernel reads each number."""


def launch_for(rows: int, outputs: int, inputs: int, tile: int) -> Launch:
    """The launch for so many rows of a weight whose groups begin at multiples of `tile` inputs. It is the same for any
    number of rows within a multiple of sixteen."""
    if rows > 64:
        return Launch(128, 64, min(64, tile), 1, 4, 3)
    return Launch(16 if rows <= 16 else 32 if rows <= 32 else 64, 64, tile, splits_of(outputs, inputs), 4, 3)


@dataclass(frozen=True, slots=True)
class GpuWeight:
    """Weights of one or more experts in the layout of `GroupedWeight`: codes uint8 [experts, outputs, …], scale
    [experts, groups, outputs] (e4m3 as bytes), zero, 8 bits, [experts, groups or 1 or 0, outputs], unit float32
    [experts, outputs]. `levels` float32 are the numbers of 16 codes if these are indices, otherwise a placeholder.

    `groups` int32 [inputs] is the group of each input. If tiles of `tile` inputs lie in one group each, groups have
    `columns` inputs, and the first group lacks its first `before`; otherwise `columns` is 0. `order` int64 [inputs], if
    any, is the order of the inputs. `scaled`, or `scaled_experts` for experts, computes many rows in bfloat16 where it
    is available. `few`: our kernel multiplies few rows, and those of experts; otherwise the weight is widened for these
    as well.
    """

    number: Number
    codes: Tensor
    inputs: int
    scale: Tensor
    zero: Tensor
    unit: Tensor
    levels: Tensor
    groups: Tensor
    tile: int
    columns: int
    before: int
    order: Tensor | None
    scaled: ScaledWeight | None = None
    scaled_experts: ScaledExperts | None = None
    few: bool = True

    @classmethod
    def of(cls, parts: Sequence[QuantizedWeight], order: Tensor | None = None) -> GpuWeight | None:
        """Concatenates the outputs of weights over the same inputs; `order` int64 [outputs] says where each output
        goes. None if they are not quantised alike. Raises ValueError if a weight is not a number."""
        if (whole := GroupedWeight.of(parts, order)) is None:
            return None
        made = cls._of([whole])
        return replace(made, scaled=ScaledWeight.of(whole, made.codes[0]), few=_is_right(made, few_are_right))

    @classmethod
    def of_experts(cls, experts: Sequence[Sequence[QuantizedWeight]]) -> GpuWeight:
        """Concatenates for each expert the outputs of weights over the same inputs. Raises ValueError if they are not
        quantised alike, or a weight is not a number."""
        found = [whole for parts in experts if (whole := GroupedWeight.of(parts)) is not None]
        first = found[0] if found else None
        if first is None or len(found) < len(experts) or not all(_alike(each, first) for each in found):
            raise ValueError("its experts are not quantised alike")
        made = cls._of(found)
        few = _is_right(made, experts_are_right)
        return replace(made, scaled_experts=ScaledExperts.of(found, made.codes), few=few)

    @classmethod
    def _of(cls, experts: Sequence[GroupedWeight]) -> GpuWeight:
        first = experts[0]
        sizes = first.ends.diff(prepend=first.ends.new_zeros(1))
        tile, columns, before = _regular(first.ends.tolist())
        scale = torch.stack([each.scale for each in experts])
        unit = torch.stack([each.unit for each in experts]) / _SHARE.get(first.number, 1.0)
        if scale.dtype == torch.float8_e4m3fn:
            scale, unit = scale.view(torch.uint8), unit / _SHARE[Number.E4M3]
        signed = first.number is Number.INT8
        return cls(
            first.number,
            torch.stack([_ordered(each) for each in experts]),
            first.inputs,
            scale,
            torch.stack([each.zero for each in experts]).to(torch.int8 if signed else torch.uint8),
            unit,
            _levels(first.number, unit),
            torch.arange(len(sizes), dtype=torch.int32, device=sizes.device).repeat_interleave(sizes),
            tile,
            columns,
            before,
            first.order,
        )

    @property
    def outputs(self) -> int:
        """Of one expert."""
        return self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all that it holds."""
        held = (self.codes, self.scale, self.zero, self.unit, self.groups, self.order)
        short = (each.scale for each in (self.scaled, self.scaled_experts) if each is not None)
        return sum(each.nbytes for each in (*held, *short) if each is not None)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x […, inputs] → x Wᵀ + b, […, outputs], in the type of x, by the first expert's weight."""
        rows = x.reshape(-1, self.inputs)
        rows = rows if self.order is None else rows[:, self.order]
        if self.few and len(rows) <= _MANY:
            out = self._run(rows)
        elif self.scaled is not None and x.dtype == torch.bfloat16:
            out = self.scaled.product(rows)
        else:
            out = self._run_wide(rows)
        return (out if bias is None else out.add_(bias)).view(*x.shape[:-1], self.outputs)

    def grouped_product(self, x: Tensor, ends: Tensor, among: int = 0) -> Tensor:
        """x [m, inputs] → [m, outputs]. The rows of expert e, which end before row `ends[e]` (int32), are multiplied
        with its weight; `among` as in `GroupedProduct`."""
        among = among or len(self.codes)
        many = len(x) > _MANY_EACH * among
        if many and self.scaled_experts is not None and x.dtype == torch.bfloat16:
            return self.scaled_experts.product(x, ends)
        x = x if self.order is None else x[:, self.order]
        return self._run(x, ends, among) if self.few or not len(x) else self._run_wide_experts(x, ends)

    def wide(self, dtype: torch.dtype) -> Tensor:
        """The first expert's weight, [outputs, inputs]."""
        found = self._wide(dtype, 0, self.outputs)
        return found if self.order is None else found[:, self.order.argsort()]

    def _run_wide(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(x), self.outputs)
        step = max(1, _AT_ONCE // self.inputs)
        for begin in range(0, self.outputs, step):
            end = min(self.outputs, begin + step)
            out[:, begin:end] = functional.linear(x, self._wide(x.dtype, begin, end))
        return out

    def _run_wide_experts(self, x: Tensor, ends: Tensor) -> Tensor:
        """By torch, which takes the first row as the first expert's: the rows of a few experts at a time, whose last
        ends are theirs, are moved there, and from there back. Rows that are none of theirs go behind all."""
        count, step = len(x), max(1, _OF_EXPERTS_AT_ONCE // (self.outputs * self.inputs))
        out, begin = x.new_empty(count + 1, self.outputs), ends.new_zeros(())
        rows = torch.arange(count, device=x.device)
        for first, some in zip(range(0, len(ends), step), ends.split(step), strict=True):
            numbers = range(first, first + len(some))
            weights = torch.stack([self._wide(x.dtype, 0, self.outputs, number) for number in numbers])
            own = rows + begin
            made = functional.grouped_mm(x[own.clamp(max=count - 1)], weights.transpose(1, 2), offs=some - begin)
            begin = some[-1]
            out[torch.where(own < begin, own, count)] = made
        return out[:count]

    def _wide(self, dtype: torch.dtype, begin: int, end: int, expert: int = 0) -> Tensor:
        """Dequantises outputs [begin, end) of an expert: [end − begin, inputs], with inputs in the order of `order`."""
        count = end - begin
        out = torch.empty(count, self.inputs, dtype=dtype, device=self.codes.device)
        grid = (triton.cdiv(count, _WIDEN[0]), triton.cdiv(self.inputs, _WIDEN[1]))
        kernels.widen_kernel[grid](
            out,
            *(self.codes[expert], self.levels, self.scale[expert], self.zero[expert], self.unit[expert], self.groups),
            *(self.outputs, self.inputs, begin),
            **self._constants(),
            OUTPUTS=_WIDEN[0],
            INPUTS=_WIDEN[1],
            num_warps=4,
        )
        return out

    def _run(self, x: Tensor, ends: Tensor | None = None, among: int = 1) -> Tensor:
        experts, m, n = len(self.codes), len(x), self.outputs
        if not m:
            return x.new_empty(0, n)
        launch = launch_for(-(-m // among), n, self.inputs, tile_for(x.dtype, self.tile))
        splits = launch.splits if ends is None else 1
        tiles = triton.cdiv(m, launch.rows) if ends is None else m // launch.rows + min(m, experts)
        dtype = x.dtype if splits == 1 else torch.float32
        out = torch.empty(splits, m, n, dtype=dtype, device=x.device)
        kernels.product_kernel[(triton.cdiv(n, launch.outputs), tiles, splits)](
            out,
            x.contiguous(),
            *(self.codes, self.levels, self.scale, self.zero, self.unit, self.groups),
            self.groups if ends is None else ends,
            *(m, n, self.inputs, self.scale.shape[1], self.before),
            **self._constants(),
            ONE=self.scale.shape[1] == 1,
            COLUMNS=self.columns,
            EXPERTS=0 if ends is None else experts,
            POWER=triton.next_power_of_2(experts),
            ROWS=launch.rows,
            OUTPUTS=launch.outputs,
            INPUTS=launch.inputs,
            SPLITS=splits,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )
        return out[0] if splits == 1 else out.sum(0).to(x.dtype)

    def _constants(self) -> dict[str, int | bool]:
        return {
            "FORM": _FORMS[self.number],
            "E4M3_SCALES": self.scale.dtype == torch.uint8,
            "ZEROS": min(2, self.zero.shape[1]),
        }


_found: dict[tuple[object, ...], bool] = {}
"""Results of trials, by the form of a weight and its device."""


def _is_right(weight: GpuWeight, trial: Callable[[GpuWeight], bool]) -> bool:
    """Whether a GPU's kernel is right for weights of this form, tried with the first of them."""
    (experts, *_), device = weight.codes.shape, weight.codes.device
    if device.type != "cuda":
        return True
    groups, zeros = min(weight.scale.shape[1], 2), min(weight.zero.shape[1], 2)
    form = trial, experts, weight.number, weight.scale.dtype, weight.tile, weight.columns, groups, zeros, device
    if form not in _found:
        _found[form] = trial(weight)
    return _found[form]


def few_are_right(weight: GpuWeight, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether products of few rows are those of the widened weight: a compiler may make wrong code of a kernel."""
    count = min(weight.outputs, _TRIED_OUTPUTS)
    wide = weight._wide(torch.float32, 0, count)

    def is_right(rows: int) -> bool:
        x = torch.randn(rows, weight.inputs, device=wide.device).to(dtype)
        what = f"products of {weight.number.value} with few rows"
        return gives(what, lambda: weight._run(x)[:, :count], x.float() @ wide.T, _APART)

    return all(map(is_right, _TRIED_ROWS))


def experts_are_right(weight: GpuWeight, dtype: torch.dtype = torch.bfloat16) -> bool:
    """The same of rows of experts, of which the first has half and the last one the others."""
    experts, count = len(weight.codes), min(weight.outputs, _TRIED_OUTPUTS)
    first, last = (weight._wide(torch.float32, 0, count, number) for number in (0, experts - 1))

    def is_right(rows: int) -> bool:
        x, half = torch.randn(rows, weight.inputs, device=first.device).to(dtype), rows // 2
        ends = torch.full((experts,), half, dtype=torch.int32, device=first.device)
        ends[-1] = rows
        expected = torch.cat((x[:half].float() @ first.T, x[half:].float() @ last.T))
        what = f"products of {weight.number.value} with rows of experts"
        return gives(what, lambda: weight._run(x, ends)[:, :count], expected, _APART)

    return all(map(is_right, _TRIED_ROWS))


def _levels(number: Number, unit: Tensor) -> Tensor:
    """The `levels` of a `GpuWeight`, on the device of its `unit`, which serves as the placeholder."""
    levels = LEVELS.get(number.value)
    return unit if levels is None else _table(levels, unit.device)


@cache
def _table(levels: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(levels, device=device)


def tile_for(dtype: torch.dtype, tile: int) -> int:
    """Inputs of a tile for rows of a type: three tiles of float32 have to fit into 99 KiB of shared memory as well."""
    return min(64, tile) if dtype == torch.float32 else tile


def _alike(one: GroupedWeight, other: GroupedWeight) -> bool:
    """Whether one kernel computes with both."""
    orders = (one.order, other.order)
    same = all(each is None for each in orders) or (
        orders[0] is not None and orders[1] is not None and torch.equal(orders[0], orders[1])
    )
    return (
        same
        and one.number is other.number
        and one.codes.shape == other.codes.shape
        and one.scale.dtype == other.scale.dtype
        and one.zero.shape == other.zero.shape
        and torch.equal(one.ends, other.ends)
    )


def _ordered(weight: GroupedWeight) -> Tensor:
    """Its codes, with inputs in its order."""
    if weight.order is None:
        return weight.codes
    if weight.number not in _PACKED:
        return weight.codes[:, weight.order]
    out = torch.empty_like(weight.codes)
    for part, codes in zip(out.split(1024), weight.codes.split(1024), strict=True):
        each = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)[:, weight.order]
        each = functional.pad(each, (0, each.shape[1] % 2))
        part.copy_(each[:, ::2] | (each[:, 1::2] << 4))
    return out


def _regular(ends: Sequence[int]) -> tuple[int, int, int]:
    """The largest tile of inputs that lies in one group wherever it begins, the size of the groups, and how many inputs
    the first one lacks. The size is 0 where groups differ in size or are too small."""
    if len(ends) == 1:
        return 128, 1 << 30, 0
    columns = max(end - begin for begin, end in zip([0, *ends], ends, strict=False))
    before = columns - ends[0]
    if all(end == min((number + 1) * columns - before, ends[-1]) for number, end in enumerate(ends)):
        for tile in (128, 64, 32):
            if columns % tile == 0 and before % tile == 0:
                return tile, columns, before
    return 64, 0, 0
