"""Products in 8 bits on both sides, for checkpoints that are made for them: weights in e4m3, inputs rounded to it on
their way, each row, or each 128 numbers of it, with a scale of its own. By the library's kernels, from Hopper on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType

from common import log
from llm_service.layers.quantized_weight import GroupedWeight, Number

_log = log.get("kernels")
_HIGHEST = torch.finfo(torch.float8_e4m3fn).max
_BLOCK = 128
_ALIGNED = 16
"""Sides of a product are multiples of it."""
_HOPPER = (9, 0)


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """`codes` e4m3 [outputs, inputs], the tensor that another form has as bytes; `scale` float32 [1, outputs], or with
    `blocks` [inputs / 128, outputs / 128], rows lying together, and a multiple of four of them."""

    codes: Tensor
    scale: Tensor
    blocks: bool

    @classmethod
    def of(cls, weight: GroupedWeight, codes: Tensor) -> ScaledWeight | None:
        """Of a weight whose numbers are `codes` uint8; None where it is not made for this, or its device does not
        compute it."""
        if not weight.rounds_inputs or weight.number is not Number.E4M3 or not _computes(weight.codes.device):
            return None
        made = cls.laid_out(weight, codes)
        return made if made is not None and _is_right(made.blocks, weight.codes.device) else None

    @classmethod
    def laid_out(cls, weight: GroupedWeight, codes: Tensor) -> ScaledWeight | None:
        """The same, whatever its device; None where its sides or its groups do not fit."""
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
        rows = functional.pad(x, (0, 0, 0, -len(x) % _ALIGNED))
        parts = rows.reshape(len(rows), -1, _BLOCK if self.blocks else rows.shape[1])
        scale = parts.abs().amax(2, keepdim=True).float().clamp_(min=torch.finfo(torch.float32).tiny * _HIGHEST)
        scale /= _HIGHEST
        numbers = (parts / scale).clamp_(-_HIGHEST, _HIGHEST).to(torch.float8_e4m3fn).view_as(rows)
        how = ScalingType.BlockWise1x128 if self.blocks else ScalingType.RowWise
        return functional.scaled_mm(
            numbers,
            self.codes.t(),
            scale.squeeze(2).t().contiguous().t() if self.blocks else scale.squeeze(2),
            how,
            self.scale,
            ScalingType.BlockWise128x128 if self.blocks else how,
            output_dtype=torch.bfloat16,
        )[: len(x)]


def _is_each(ends: Tensor) -> bool:
    """Whether each group has 128 inputs."""
    return ends.tolist() == list(range(_BLOCK, _BLOCK * len(ends) + 1, _BLOCK))


def _computes(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _HOPPER


@cache
def _is_right(blocks: bool, device: torch.device) -> bool:
    """Whether the library's kernel is there, and gives what plain torch does. Tried once, when a model is loaded."""
    weight = torch.randn(2 * _BLOCK, 3 * _BLOCK, device=device).to(torch.float8_e4m3fn)
    grid = (3, 2 * _BLOCK) if blocks else (1, 2 * _BLOCK)
    scale = (torch.rand(grid[0], 2, device=device) + 0.5).repeat_interleave(_BLOCK, 1)
    ends = torch.arange(_BLOCK, 3 * _BLOCK + 1, _BLOCK) if blocks else torch.tensor([3 * _BLOCK])
    none, ones = torch.empty(0, 2 * _BLOCK, dtype=torch.int32), torch.ones(2 * _BLOCK, device=device)
    codes = weight.view(torch.uint8)
    made = ScaledWeight.laid_out(GroupedWeight(Number.E4M3, codes, 3 * _BLOCK, scale, none, ones, ends), codes)
    assert made is not None
    x = torch.randn(40, 3 * _BLOCK, device=device).bfloat16()
    wide = weight.float() * scale.repeat_interleave(3 * _BLOCK // grid[0], 0).T
    expected = x.float() @ wide.T
    try:
        error = (made.product(x).float() - expected).norm() / expected.norm()
    except (RuntimeError, NotImplementedError) as refused:
        _log.warning("products of e4m3 are not there", blocks=blocks, cause=str(refused).partition("\n")[0])
        return False
    if not (right := bool(error < 0.05)):
        _log.warning("products of e4m3 are wrong here", blocks=blocks, error=float(error))
    return right
