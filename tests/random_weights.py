"""Quantised weights of random bits."""

from __future__ import annotations

import torch

from llm_service.layers.linear.quantized_weight import Number, QuantizedWeight


def random_weight(
    number: Number,
    outputs: int,
    inputs: int,
    *,
    columns: int,
    rows: int = 1,
    before: int = 0,
    zeros: bool = False,
    scale: torch.dtype = torch.float16,
) -> QuantizedWeight:
    """Of random bits; `before` inputs of its first group are another rank's."""
    codes = torch.randint(0, 256, (outputs, -(-inputs // 2) if number.bits == 4 else inputs), dtype=torch.uint8)
    if number is Number.E4M3:
        codes[(codes & 0x7F) == 0x7F] = 0  # not a number
    grid = -(-outputs // rows), -(-(before + inputs) // columns)
    zero = torch.randint(0, 16, grid, dtype=torch.uint8) if zeros else 0
    scales = (torch.rand(grid) + 0.5).to(scale)
    return QuantizedWeight(number, codes, inputs, scales, zero, rows=rows, columns=columns, first=(0, before))


def experts(number: Number, count: int, outputs: int, inputs: int) -> list[list[QuantizedWeight]]:
    """Two parts of each."""
    return [
        [random_weight(number, outputs // 2, inputs, columns=32, zeros=number is Number.UINT4) for _ in range(2)]
        for _ in range(count)
    ]
