"""What adapters add by our kernels against torch's products, on any device."""

from __future__ import annotations

import numpy as np
import torch

from llm_service.layers.gpu import lora_kernels
from llm_service.layers.lora.row_tiles import RowTiles, tile_numbers
from llm_service.layers.lora.slots import pieces_of

TYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = ((5, 40, (24,)), (16, 300, (70, 20, 20)), (100, 2080, (64, 90)))
"""Rank of slots, inputs, and outputs of each part: some rank in two pieces, inputs in several, outputs that do not fill
what one program takes."""
BATCHES = ([2], [-1, 0, 2, 2, -1, 1], [1] * 40 + [-1] * 3 + [0, 2] * 9, [-1, -1])
"""The slot of each row, -1 for none."""


def check_add(
    rank: int, inputs: int, parts: tuple[int, ...], slots: list[int], dtype: torch.dtype, device: str
) -> None:
    """Into a part of longer rows; slots of a lower rank and parts without an adapter hold NaN where nobody may read."""
    random = torch.Generator().manual_seed(len(slots))
    outputs, kinds, rows = sum(parts), 3, len(slots)
    a = torch.randn(kinds, len(parts), rank, inputs, generator=random) / inputs**0.5
    b = torch.randn(kinds, rank, outputs, generator=random)
    x = torch.randn(rows, inputs + 16, generator=random)[:, :inputs]
    before = torch.randn(rows, outputs + 32, generator=random)
    a, b, x, before = (each.to(device, dtype) for each in (a, b, x, before))
    ranks = torch.tensor([[max(1, rank - 3 * kind)] * len(parts) for kind in range(kinds)], dtype=torch.int32)
    ranks[1, -1] = 0
    ends = np.cumsum((0, *parts)).tolist()
    runs = [(part, ends[part], ends[part + 1]) for part in range(len(parts))]
    for kind in range(kinds):
        for part, begin, end in runs:
            own = int(ranks[kind, part])
            a[kind, part, own:] = torch.nan
            b[kind, own:, begin:end] = torch.nan
    tiles = RowTiles(torch.from_numpy(tile_numbers(np.array(slots))).to(device), rows)
    blocks = torch.tensor(
        pieces_of([[run[1:]] for run in runs], lora_kernels.OUTPUTS), dtype=torch.int32, device=device
    )
    scales = torch.rand(ranks.shape, generator=random) + 0.5
    of_slots = ranks.to(device), scales.to(device)
    out = before.clone()
    lora_kernels.add(out[:, 16:-16], x, (a, b), of_slots, blocks, tiles)
    expected = before.double()
    for row, slot in enumerate(slots):
        for part, begin, end in runs if slot >= 0 else ():
            own = int(ranks[slot, part])
            inner = float(scales[slot, part]) * (x[row].double() @ a[slot, part, :own].double().T)
            expected[row, 16 + begin : 16 + end] += inner @ b[slot, :own, begin:end].double()
    close = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=close, atol=close * rank**0.5)
    alone = torch.tensor(slots) < 0
    assert torch.equal(out[alone], before[alone]), "who has no adapter keeps every bit"
    assert torch.equal(out[:, :16], before[:, :16])
    assert torch.equal(out[:, -16:], before[:, -16:])
