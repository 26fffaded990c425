"""Random 8-bit and 4-bit weights in checkpoints' formats, of a layer's real size, for timing only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from llm_service.layers.linear.quantized_weight import Number, QuantizedWeight

_GROUP = 128


def fp8(weight: Tensor) -> QuantizedWeight:
    """Qwen's own: e4m3, a scale for each block of 128 by 128."""
    outputs, inputs = weight.shape
    codes = weight.to(torch.float8_e4m3fn).view(torch.uint8)
    scale = torch.ones(-(-outputs // _GROUP), -(-inputs // _GROUP), device=weight.device)
    return QuantizedWeight(Number.E4M3, codes, inputs, scale, rows=_GROUP, columns=_GROUP, rounds_inputs=True)


def awq(weight: Tensor) -> QuantizedWeight:
    """4 bits, a scale and a zero for each 128 inputs of an output; as large as weights whose sums stay around 1."""
    outputs, inputs = weight.shape
    here = weight.device
    codes = torch.randint(0, 256, (outputs, -(-inputs // 2)), dtype=torch.uint8, device=here)
    grid = outputs, -(-inputs // _GROUP)
    zero = torch.randint(7, 9, grid, dtype=torch.uint8, device=here)
    scale = torch.full(grid, 0.2 * inputs**-0.5, dtype=torch.float16, device=here)
    return QuantizedWeight(Number.UINT4, codes, inputs, scale, zero, columns=_GROUP)


FORMS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "int8": QuantizedWeight.rounded,
    "w8a8": partial(QuantizedWeight.rounded, inputs=True),
    "fp8": fp8,
    "awq": awq,
}
"""By the names of options."""
BYTES = {"int8": 1.0, "w8a8": 1.0, "fp8": 1.0, "awq": 0.5}
"""Of a weight, without scales."""
