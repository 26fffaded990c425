"""Products with 8 bits on both sides, for checkpoints made for them: weights in e4m3, inputs rounded to it at run time
with a scale for each row or each 128 numbers. Computed by transformers' kernels, for experts by one of ours, on Hopper
or later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType

from llm_service.layers.gpu.kernel_trial import gives
from llm_service.layers.gpu.scaled_kernel import round_to_e4m3_kernel, scaled_product_kernel
from llm_service.layers.linear.quantized_weight import GroupedWeight, Number

_HIGHEST = torch.finfo(torch.float8_e4m3fn).max
_BLOCK = 128
_ROUNDED = 4096
"""Numbers of a row that are rounded at a time, at most."""
_ALIGNED = 16
"""Sides of a product are multiples of this."""
_HOPPER = (9, 0)
_APART = 4e-3
"""How far a product may be from the exact one of the same rounded rows; bfloat16 takes 0.0017 of it."""
_TRIED = 32 * _BLOCK
"""Inputs of a trial: with so many, sums that are kept in fewer bits than float32 show."""


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """`codes` e4m3 [outputs, inputs], the tensor that another form has as bytes; `scale` float32 [1, outputs], or with
    `blocks` [inputs / 128, outputs / 128], rows lying together, and a multiple of four of them."""

    codes: Tensor
    scale: Tensor
    blocks: bool

    @classmethod
    def of(cls, weight: GroupedWeight, codes: Tensor) -> ScaledWeight | None:
        """The weight for numbers `codes` uint8. None if its format is another one, or its device does not compute
        it."""
        if not _is_made_for_it(weight):
            return None
        made = cls.laid_out(weight, codes)
        return made if made is not None and _is_right(made.blocks, weight.codes.device) else None

    @classmethod
    def laid_out(cls, weight: GroupedWeight, codes: Tensor) -> ScaledWeight | None:
        """The same, whatever its device. None if its sides or groups do not fit."""
        groups, outputs = weight.scale.shape
        numbers = codes.view(torch.float8_e4m3fn)
        if outputs % _ALIGNED or weight.inputs % _ALIGNED or weight.order is not None:
            return None
        if groups == 1:
            return cls(numbers, (weight.scale[:1].float() * weight.unit).contiguous(), blocks=False)
        if outputs % _BLOCK or weight.inputs != groups * _BLOCK or not _is_each(weight.ends):
            return None
        blocks = (weight.scale.float() * weight.unit).view(groups, -1, _BLOCK)
        if not torch.equal(blocks, blocks[:, :, :1].expand_as(blocks)):
            return None
        scale = functional.pad(blocks[:, :, 0].T, (0, -groups % 4)).contiguous().T
        return cls(numbers, scale, blocks=True)

    def product(self, x: Tensor) -> Tensor:
        """x bfloat16 [m, inputs] → x Wᵀ [m, outputs], in the same type."""
        rows = triton.cdiv(len(x), _ALIGNED) * _ALIGNED
        numbers, scale = _rounded(x, blocks=self.blocks, rows=rows, by_group=self.blocks)
        how = ScalingType.BlockWise1x128 if self.blocks else ScalingType.RowWise
        return functional.scaled_mm(
            numbers,
            self.codes.t(),
            scale,
            how,
            self.scale,
            ScalingType.BlockWise128x128 if self.blocks else how,
            output_dtype=torch.bfloat16,
        )[: len(x)]


@dataclass(frozen=True, slots=True)
class ScaledLaunch:
    """Tile sizes of one program and its number of warps."""

    rows: int = 64
    outputs: int = 128
    inputs: int = _BLOCK
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, slots=True)
class ScaledExperts:
    """`codes` e4m3 as bytes [experts, outputs, inputs], the tensor that another form has; `scale` float32 [experts,
    inputs / 128, outputs], or without `blocks` [experts, 1, outputs]."""

    codes: Tensor
    scale: Tensor
    blocks: bool

    @classmethod
    def of(cls, experts: Sequence[GroupedWeight], codes: Tensor) -> ScaledExperts | None:
        """The experts' weights for numbers `codes` uint8. None if their format is another one, or their device does not
        compute it."""
        first = experts[0]
        if not all(_is_made_for_it(each) for each in experts) or first.order is not None:
            return None
        groups = len(first.scale)
        blocks = groups > 1
        if blocks and (first.inputs != groups * _BLOCK or not _is_each(first.ends)):
            return None
        scale = torch.stack([each.scale.float() * each.unit for each in experts])
        made = cls(codes, scale, blocks)
        return made if _are_right(blocks, codes.device) else None

    def product(self, x: Tensor, ends: Tensor) -> Tensor:
        """x bfloat16 [m, inputs] → bfloat16 [m, outputs]. The rows of expert e, which end before row `ends[e]` (int32),
        are multiplied with its weight."""
        (experts, n, k), m, launch = self.codes.shape, len(x), ScaledLaunch()
        out = x.new_empty(m, n)
        if not m:
            return out
        numbers, scale = _rounded(x, blocks=self.blocks, rows=m, ends=ends)
        tiles = m // launch.rows + min(m, experts)
        scaled_product_kernel[(triton.cdiv(n, launch.outputs), tiles)](
            out,
            numbers,
            scale,
            *(self.codes, self.scale, ends),
            *(n, k),
            ONE=not self.blocks,
            EXPERTS=experts,
            POWER=triton.next_power_of_2(experts),
            ROWS=launch.rows,
            OUTPUTS=launch.outputs,
            INPUTS=launch.inputs,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )
        return out


def _rounded(
    x: Tensor, *, blocks: bool, rows: int, by_group: bool = False, ends: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `rounded_plainly`, by a kernel: with `blocks` a scale for each 128 numbers, otherwise for each row; padded
    with zeros to `rows` rows. Scales are stored by row, or with `by_group` by group. With `ends`, where each expert's
    rows end, the rows behind all experts are left uninitialised."""
    m, k = x.shape
    groups = k // _BLOCK if blocks else 1
    numbers = x.new_empty(rows, k, dtype=torch.float8_e4m3fn)
    kept = x.new_empty(*((groups, rows) if by_group else (rows, groups)), dtype=torch.float32)
    scales = kept.t() if by_group else kept
    block = min(_ROUNDED, triton.next_power_of_2(k))
    round_to_e4m3_kernel[(rows,)](
        *(numbers, kept, x.contiguous(), kept if ends is None else ends),
        *(m, k, *scales.stride()),
        WIDTH=_BLOCK if blocks else 0,
        BLOCK=block,
        ENDS=0 if ends is None else len(ends),
        num_warps=4 if block <= 1024 else 8,
    )
    return numbers, scales


def rounded_plainly(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Rounds x [m, k] to e4m3 by torch's operators. Returns it and the scale of each `width` numbers, float32 [m, k /
    width], with which the largest of them becomes e4m3's largest."""
    parts = x.contiguous().view(len(x), -1, width)
    scale = parts.abs().amax(2, keepdim=True).float().clamp_(min=torch.finfo(torch.float32).tiny * _HIGHEST)
    scale /= _HIGHEST
    numbers = (parts / scale).clamp_(-_HIGHEST, _HIGHEST).to(torch.float8_e4m3fn)
    return numbers.view_as(x), scale.squeeze(2)


def _is_made_for_it(weight: GroupedWeight) -> bool:
    return weight.rounds_inputs and weight.number is Number.E4M3 and runs_on(weight.codes.device)


def _is_each(ends: Tensor) -> bool:
    """Whether each group has 128 inputs."""
    return ends.tolist() == list(range(_BLOCK, _BLOCK * len(ends) + 1, _BLOCK))


def runs_on(device: torch.device) -> bool:
    """Whether a device multiplies as these products need it."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _HOPPER


@cache
def _is_right(blocks: bool, device: torch.device) -> bool:
    """Whether transformers' kernel runs and agrees with plain torch. Tried once, when a model is loaded."""
    weight, wide = _example(blocks, device)
    made = ScaledWeight.laid_out(weight, weight.codes)
    assert made is not None
    x, expected = _rows_of(wide, blocks)
    return gives("products of e4m3", lambda: made.product(x), expected, _APART, blocks=blocks)


@cache
def _are_right(blocks: bool, device: torch.device) -> bool:
    """The same of our kernel, for two experts."""
    weight, wide = _example(blocks, device)
    scale = (weight.scale * weight.unit).expand(2, -1, -1).contiguous()
    made = ScaledExperts(weight.codes.expand(2, -1, -1).contiguous(), scale, blocks)
    x, expected = _rows_of(wide, blocks)
    ends = torch.tensor([7, 40], dtype=torch.int32, device=device)
    return gives("experts' products of e4m3", lambda: made.product(x, ends), expected, _APART, blocks=blocks)


def _rows_of(wide: Tensor, blocks: bool) -> tuple[Tensor, Tensor]:
    """Rows in bfloat16, and the product of their rounded form."""
    x = torch.randn(40, _TRIED, device=wide.device).bfloat16()
    numbers, scale = rounded_plainly(x, _BLOCK if blocks else _TRIED)
    return x, (numbers.float() * scale.repeat_interleave(_TRIED // scale.shape[1], 1)) @ wide.T


def _example(blocks: bool, device: torch.device) -> tuple[GroupedWeight, Tensor]:
    """A weight, and the same in float32."""
    numbers = torch.randn(2 * _BLOCK, _TRIED, device=device).to(torch.float8_e4m3fn)
    groups = _TRIED // _BLOCK if blocks else 1
    scale = (torch.rand(groups, 2, device=device) + 0.5).repeat_interleave(_BLOCK, 1)
    ends = torch.arange(_BLOCK, _TRIED + 1, _BLOCK) if blocks else torch.tensor([_TRIED])
    none, ones = torch.empty(0, 2 * _BLOCK, dtype=torch.int32), torch.ones(2 * _BLOCK, device=device)
    weight = GroupedWeight(Number.E4M3, numbers.view(torch.uint8), _TRIED, scale, none, ones, ends)
    return weight, numbers.float() * scale.repeat_interleave(_TRIED // groups, 0).T
