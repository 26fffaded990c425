"""Weights of 8 bits that are multiplied with rows of as many (W8A8), on a GPU. By kernels of ours: torch's product
takes no fewer than 17 rows, sides that are multiples of 8 alone, no experts, and its sums, 32 bits each, would have to
be read again for their scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from llm_service.layers.gpu import int8_kernels as kernels
from llm_service.layers.gpu.kernel_trial import gives
from llm_service.layers.gpu.launch import LEAST, Launch, splits_of
from llm_service.layers.linear.quantized_weight import GroupedWeight, Number, QuantizedWeight, rounded_rows

_MOST_INPUTS = (1 << 17) - 1
"""The sum of so many products of numbers from −128 to 127 fits into 32 bits."""
_BESIDE = 16
"""Tiles of rows that share a tile of weights while a cache holds it."""
_BLOCK = 4096
"""Numbers of a row that are rounded at a time, at most."""
_JOINED = 512
"""Outputs whose sums one program joins."""
_APART = 0.005
"""Of a product, by how much bfloat16 may change it."""


def launch_for(rows: int, outputs: int, inputs: int) -> Launch:
    """The launch for a product of a weight with so many rows."""
    if rows > 64:
        return Launch(128, 128, 128, 1, 8, 3)
    splits = splits_of(outputs, inputs)
    if rows <= 16:
        return Launch(16, 64, 256, splits, 4, 4)
    return Launch(32 if rows <= 32 else 64, 64, 128, splits, 4, 4)


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """Weights of one or more experts, w[o, i] = number[o, i] · scale[o]. They are multiplied with rows x[i] ≈
    rounded[i] · s, where s is the row's largest absolute value divided by 127.5, or, with `steps` float32 [experts],
    the step of the row's expert.

    `codes` int8 [experts, outputs, inputs] are the numbers, `scale` is float32 [experts, outputs].
    """

    codes: Tensor
    scale: Tensor
    steps: Tensor | None = None

    @classmethod
    def of(cls, parts: Sequence[QuantizedWeight], order: Tensor | None = None) -> Int8Weight | None:
        """Concatenates the outputs of weights over the same inputs; `order` int64 [outputs] says where each output
        goes. None if their format is another one, or the kernels do not run on this device."""
        whole = _plain(parts, order)
        return None if whole is None else cls._of([whole], [parts[0].input_scale])

    @classmethod
    def of_experts(cls, experts: Sequence[Sequence[QuantizedWeight]]) -> Int8Weight | None:
        """The same of each expert's."""
        found = [whole for parts in experts if (whole := _plain(parts)) is not None]
        steps = [parts[0].input_scale for parts in experts]
        alike = len({each.codes.shape for each in found}) == 1 and all(steps) == any(steps)
        return cls._of(found, steps) if alike and len(found) == len(experts) else None

    @classmethod
    def _of(cls, experts: Sequence[GroupedWeight], steps: Sequence[float]) -> Int8Weight:
        codes = torch.stack([each.codes for each in experts]).view(torch.int8)
        scale = torch.stack([each.scale[0].float() * each.unit for each in experts])
        return cls(codes, scale, scale.new_tensor(steps) if any(steps) else None)

    @property
    def number(self) -> Number:
        """The number format of the weight."""
        return Number.INT8

    @property
    def rounded_inputs(self) -> Number:
        """The number format that inputs are rounded to."""
        return Number.INT8

    @property
    def nbytes(self) -> int:
        """Bytes of all that it holds."""
        return self.codes.nbytes + self.scale.nbytes + (0 if self.steps is None else self.steps.nbytes)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x […, inputs] → x Wᵀ + b, […, outputs], in the type of x, by the first expert's weight."""
        _, outputs, inputs = self.codes.shape
        return self._run(x.reshape(-1, inputs), bias=bias).view(*x.shape[:-1], outputs)

    def grouped_product(self, x: Tensor, ends: Tensor, among: int = 0) -> Tensor:
        """x [m, inputs] → [m, outputs]. The rows of expert e, which end before row `ends[e]` (int32), are multiplied
        with its weight; `among` as in `GroupedProduct`."""
        return self._run(x, ends, among=among or len(self.codes))

    def _run(self, x: Tensor, ends: Tensor | None = None, bias: Tensor | None = None, *, among: int = 1) -> Tensor:
        (experts, n, k), m = self.codes.shape, len(x)
        out = x.new_empty(m, n)
        if not m:
            return out
        numbers, scales = _rounded(x.contiguous(), self.steps, ends)
        launch = launch_for(-(-m // among), n, k)
        splits = launch.splits if ends is None else 1
        tiles = triton.cdiv(m, launch.rows) if ends is None else m // launch.rows + min(m, experts)
        sums = out if splits == 1 else torch.empty(splits, m, n, dtype=torch.int32, device=x.device)
        added = self.scale if bias is None else bias
        kernels.int8_product_kernel[(triton.cdiv(n, launch.outputs) * tiles, splits)](
            sums,
            numbers,
            scales,
            *(self.codes, self.scale, added, self.scale if ends is None else ends),
            *(m, n, k, tiles),
            BIAS=bias is not None,
            EXPERTS=0 if ends is None else experts,
            POWER=triton.next_power_of_2(experts),
            ROWS=launch.rows,
            OUTPUTS=launch.outputs,
            INPUTS=launch.inputs,
            SPLITS=splits,
            BESIDE=_BESIDE,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )
        if splits > 1:
            kernels.int8_join_kernel[(triton.cdiv(n, _JOINED), m)](
                *(out, sums, scales, self.scale, added),
                *(m, n),
                BIAS=bias is not None,
                SPLITS=splits,
                BLOCK=_JOINED,
                num_warps=4,
            )
        return out


def computes(device: torch.device) -> bool:
    """Whether our kernels run on a device and compute correctly."""
    return _is_right(device)


def _rounded(x: Tensor, steps: Tensor | None = None, ends: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `rounded_rows`, for x [m, k], contiguous, in any floating-point dtype. With `steps`, as in `Int8Weight`, the
    rows of each expert end before row `ends`, and rows behind all experts are left uninitialised."""
    m, k = x.shape
    numbers, scales = x.new_empty(m, k, dtype=torch.int8), x.new_empty(m, dtype=torch.float32)
    block = min(_BLOCK, triton.next_power_of_2(k))
    experts = 0 if ends is None else len(ends)
    kernels.round_rows_kernel[(m,)](
        numbers,
        scales,
        x,
        scales if steps is None else steps,
        scales if ends is None else ends,
        k,
        STEPS=steps is not None,
        EXPERTS=experts,
        POWER=triton.next_power_of_2(max(1, experts)),
        BLOCK=block,
        num_warps=4 if block <= 1024 else 8,
    )
    return numbers, scales


def _plain(parts: Sequence[QuantizedWeight], order: Tensor | None = None) -> GroupedWeight | None:
    """Concatenates the outputs of weights for int8 inputs if a kernel supports their format; otherwise None."""
    whole = GroupedWeight.of_bytes(parts, order, _MOST_INPUTS)
    return whole if whole is not None and _is_right(whole.codes.device) else None


@cache
def _is_right(device: torch.device) -> bool:
    """Tries our kernels against plain torch: with few rows, whose inputs are split, with many rows, and with
    experts."""
    inputs = 2 * LEAST
    codes = torch.randint(-128, 128, (2, 96, inputs), dtype=torch.int8, device=device)
    scale, x = torch.rand(2, 96, device=device) + 0.5, torch.randn(80, inputs, device=device).bfloat16()
    numbers, scales = rounded_rows(x.float())
    wide = codes.float() * scale.unsqueeze(2)
    expected = (numbers.float() * scales.unsqueeze(1)) @ wide.transpose(1, 2)
    one, both = Int8Weight(codes[:1], scale[:1]), Int8Weight(codes, scale)
    ends = torch.tensor([30, 80], dtype=torch.int32, device=device)
    of_experts = torch.cat((expected[0, :30], expected[1, 30:]))
    told = "products of int8"
    return (
        gives(told, lambda: one.product(x[:5]), expected[0, :5], _APART)
        and gives(told, lambda: one.product(x), expected[0], _APART)
        and gives(told, lambda: both.grouped_product(x, ends), of_experts, _APART)
    )
