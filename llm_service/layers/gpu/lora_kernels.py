"""Adds the adapters of a batch, a different one for each row if need be, in Triton: two kernels per layer, whatever the
number of adapters. Slots never move in memory, so CUDA graphs can hold them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from llm_service.layers.lora.row_tiles import TILE, RowTiles

_INPUTS, _SPLIT, _RANKS, OUTPUTS = 128, 1024, 64, 64
"""Tile sizes: inputs at a time and in all, ranks, outputs."""


@triton.jit(do_not_specialize=["parts", "count"])
def shrink_kernel(
    between,
    x,
    a,
    rows,
    tiles,
    ranks,
    x_row,
    inputs,
    parts,
    count,
    rank,
    HEIGHT: tl.constexpr,
    RANKS: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Multiplies rows of x with the A of their slots. Grid [tiles, parts * PIECES, inputs / SPLIT]; a piece is RANKS of
    a rank.

    Rows of x are `x_row` elements apart; a [slots, parts, rank, inputs]; int32 rows [count], tiles [tiles, 3], ranks
    [slots, parts]; float32 between [inputs / SPLIT, parts, count, RANKS * PIECES], where the rows of a tile are
    adjacent.
    """
    slot = tl.load(tiles + tl.program_id(0) * 3)
    part, piece, split = tl.program_id(1) // PIECES, tl.program_id(1) % PIECES, tl.program_id(2)
    if slot >= 0:
        own = tl.load(ranks + slot * parts + part)
        if piece * RANKS < own:
            place = tl.load(tiles + tl.program_id(0) * 3 + 1) + tl.arange(0, HEIGHT)
            inside = place < tl.load(tiles + tl.program_id(0) * 3 + 2)
            row = tl.load(rows + place, inside, 0).to(tl.int64)
            low = piece * RANKS + tl.arange(0, RANKS)
            matrix = a + (slot.to(tl.int64) * parts + part) * rank * inputs
            total = tl.zeros((HEIGHT, RANKS), tl.float32)
            for first in range(split * SPLIT, min(split * SPLIT + SPLIT, inputs), BLOCK):
                at = first + tl.arange(0, BLOCK)
                given = tl.load(x + row[:, None] * x_row + at, inside[:, None] & (at < inputs), 0.0)
                factors = tl.load(matrix + low * inputs + at[:, None], (low < own) & (at < inputs)[:, None], 0.0)
                if WIDEN:
                    given, factors = given.to(tl.float32), factors.to(tl.float32)
                total = tl.dot(given, factors, total, input_precision=PRECISION)
            there = (split * parts + part).to(tl.int64) * count + place
            tl.store(between + there[:, None] * (RANKS * PIECES) + low, total, inside[:, None])


@triton.jit(do_not_specialize=["parts", "count", "splits"])
def expand_kernel(
    out,
    between,
    b,
    rows,
    tiles,
    ranks,
    scales,
    blocks,
    out_row,
    outputs,
    parts,
    count,
    rank,
    splits,
    HEIGHT: tl.constexpr,
    RANKS: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Multiplies the result of `shrink_kernel` with the scale and the B of each row's slot and adds it to out, whose
    rows are `out_row` elements apart. Grid [tiles, blocks]; b [slots, rank, outputs]; float32 scales [slots, parts];
    int32 blocks [blocks, 3]: a part and the begin and end of its outputs, at most BLOCK."""
    slot = tl.load(tiles + tl.program_id(0) * 3)
    if slot >= 0:
        part = tl.load(blocks + tl.program_id(1) * 3)
        own = tl.load(ranks + slot * parts + part)
        if own > 0:
            place = tl.load(tiles + tl.program_id(0) * 3 + 1) + tl.arange(0, HEIGHT)
            inside = place < tl.load(tiles + tl.program_id(0) * 3 + 2)
            row = tl.load(rows + place, inside, 0).to(tl.int64)
            at = tl.load(blocks + tl.program_id(1) * 3 + 1) + tl.arange(0, BLOCK)
            mine = at < tl.load(blocks + tl.program_id(1) * 3 + 2)
            total = tl.zeros((HEIGHT, BLOCK), tl.float32)
            for first in range(0, own, RANKS):
                low = first + tl.arange(0, RANKS)
                inner = tl.zeros((HEIGHT, RANKS), tl.float32)
                for split in range(splits):
                    there = (split * parts + part).to(tl.int64) * count + place
                    inner += tl.load(between + there[:, None] * (RANKS * PIECES) + low, inside[:, None], 0.0)
                factors = b + slot.to(tl.int64) * rank * outputs + low[:, None] * outputs + at
                given = tl.load(factors, (low < own)[:, None] & mine, 0.0)
                inner = (inner * tl.load(scales + slot * parts + part)).to(given.dtype)
                if WIDEN:
                    inner, given = inner.to(tl.float32), given.to(tl.float32)
                total = tl.dot(inner, given, total, input_precision=PRECISION)
            target, both = out + row[:, None] * out_row + at, inside[:, None] & mine
            before = tl.load(target, both, 0.0).to(tl.float32)
            tl.store(target, (before + total).to(out.dtype.element_ty), both)


@dataclass(frozen=True, slots=True)
class AdapterLaunch:
    """Constants of both kernels, for slots of a rank."""

    ranks: int
    pieces: int
    precision: str
    widen: bool = False

    @classmethod
    def of(cls, rank: int, dtype: torch.dtype, device: str = "cuda") -> AdapterLaunch:
        """For matrices of a type. Triton's interpreter, on a CPU, does not multiply in bfloat16."""
        ranks = min(max(triton.next_power_of_2(rank), 16), _RANKS)
        precision = "ieee" if dtype == torch.float32 else "tf32"
        return cls(ranks, triton.cdiv(rank, ranks), precision, device == "cpu" and dtype == torch.bfloat16)

    @property
    def both(self) -> dict[str, int | str]:
        """Arguments of both kernels."""
        sizes = {"HEIGHT": TILE, "RANKS": self.ranks, "PIECES": self.pieces}
        return {**sizes, "PRECISION": self.precision, "WIDEN": self.widen}

    @property
    def shrink(self) -> dict[str, int | str]:
        """Constants of `shrink_kernel`."""
        return {**self.both, "BLOCK": _INPUTS, "SPLIT": _SPLIT, "num_warps": 4}

    @property
    def expand(self) -> dict[str, int | str]:
        """Constants of `expand_kernel`."""
        return {**self.both, "BLOCK": OUTPUTS, "num_warps": 4}


def add(
    out: Tensor,
    x: Tensor,
    matrices: tuple[Tensor, Tensor],
    of_slots: tuple[Tensor, Tensor],
    blocks: Tensor,
    tiles: RowTiles,
) -> None:
    """Adds scale · x Aᵀ Bᵀ to out [n, outputs] in place, for x [n, inputs], slots of A [slots, parts, rank, inputs] and
    B [slots, rank, outputs], of which ranks int32 [slots, parts] are used, and scales float32 [slots, parts]. `blocks`
    int32 [k, 3] are part, begin and end of the outputs, at most OUTPUTS each."""
    (a, b), (ranks, scales), number = matrices, of_slots, len(tiles.tiles)
    if not number:
        return
    (_, parts, rank, inputs), count = a.shape, len(x)
    launch, splits = AdapterLaunch.of(rank, a.dtype, x.device.type), triton.cdiv(inputs, _SPLIT)
    between = torch.empty(splits, parts, count, launch.ranks * launch.pieces, device=x.device)
    where = tiles.rows, tiles.tiles, ranks
    shared = parts, count, rank
    first, second = (number, parts * launch.pieces, splits), (number, len(blocks))
    shrink_kernel[first](between, x, a, *where, x.stride(0), inputs, *shared, **launch.shrink)
    expand_kernel[second](
        out, between, b, *where, scales, blocks, out.stride(0), b.shape[2], *shared, splits, **launch.expand
    )
