"""Attention within the segments of a packed sequence, in Triton: not causal, any mix of lengths, any head size up to
256. One program computes one *tile* of one head, by online softmax (https://arxiv.org/abs/2205.14135). Tiles come from
a table in device memory, which is all that a launch knows of the segments; they never span two, and empty ones end at
once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = 1.4426950408889634


@triton.jit
def _varlen_attention(
    query,
    key,
    value,
    out,
    tiles,
    scale,  # 1 / sqrt(head), times log2(e): exponentials are powers of two
    query_row,
    key_row,
    value_row,
    out_row,
    QUERY_HEAD: tl.constexpr,  # heads of 72 are 8 apart from a multiple of 16: as a number that the compiler does not
    KEY_HEAD: tl.constexpr,  # know, it would have every element read alone
    VALUE_HEAD: tl.constexpr,
    OUT_HEAD: tl.constexpr,
    HEAD: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    tile = tiles + 3 * tl.program_id(0)
    first = tl.load(tile)
    start = tl.load(tile + 1)
    end = tl.load(tile + 2)
    if first >= end:
        return
    head = tl.program_id(1)
    dims = tl.arange(0, PADDED)
    real = dims < HEAD  # a head of 72 or 80 is padded to 128 with zeros
    rows = (first + tl.arange(0, ROWS)).to(tl.int64)
    kept = (rows < end)[:, None] & real[None, :]
    queries = tl.load(query + head * QUERY_HEAD + rows[:, None] * query_row + dims[None, :], mask=kept, other=0.0)
    if WIDEN:
        queries = queries.to(tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED], tl.float32)
    for at in range(start, end, KEYS):
        places = (at + tl.arange(0, KEYS)).to(tl.int64)
        there = places < end
        wanted = there[:, None] & real[None, :]
        keys = tl.load(key + head * KEY_HEAD + places[:, None] * key_row + dims[None, :], mask=wanted, other=0.0)
        if WIDEN:
            keys = keys.to(tl.float32)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        scores = tl.where(there[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weights, 1)
        values = tl.load(
            value + head * VALUE_HEAD + places[:, None] * value_row + dims[None, :], mask=wanted, other=0.0
        )
        weights = weights.to(values.dtype)
        if WIDEN:
            weights, values = weights.to(tl.float32), values.to(tl.float32)
        mixed = mixed * fade[:, None] + tl.dot(weights, values, input_precision=PRECISION)
        top = higher
    mixed = mixed / total[:, None]
    where = out + head * OUT_HEAD + rows[:, None] * out_row + dims[None, :]
    tl.store(where, mixed.to(out.dtype.element_ty), mask=kept)


def tile_rows(longest: int) -> int:
    """Queries of a tile if no segment has more than `longest`."""
    return 64 if longest <= 64 else 128


def tiles(lengths: Iterable[int], rows: int) -> list[tuple[int, int, int]]:
    """The table: (first query, segment's start, segment's end) of each tile of at most `rows` queries.

    >>> tiles([3, 5], 4)
    [(0, 0, 3), (3, 3, 8), (7, 3, 8)]
    """
    table, start = [], 0
    for length in lengths:
        end = start + length
        table += [(first, start, end) for first in range(start, end, rows)]
        start = end
    return table


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor, rows: int) -> Tensor:
    """Full attention within each segment: q, k, v and the result are [N, heads, head] in float32, bfloat16 or float16.

    `table` is `tiles(lengths, rows)` as int32 [T, 3] on the same device; a tile whose first query is not before its
    segment's end is skipped. Rows of the result that no tile covers are not initialised. Raises ValueError if the last
    dimension of q, k or v is not contiguous, or above 256.
    """
    count, heads, head = q.shape
    if head > 256 or any(part.stride(-1) != 1 for part in (q, k, v)):
        raise ValueError("heads must be contiguous and have at most 256 elements")
    out = torch.empty((count, heads, head), dtype=q.dtype, device=q.device)
    _varlen_attention[(len(table), heads)](
        q,
        k,
        v,
        out,
        table,
        _LOG2_E / head**0.5,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        out.stride(0),
        QUERY_HEAD=q.stride(1),
        KEY_HEAD=k.stride(1),
        VALUE_HEAD=v.stride(1),
        OUT_HEAD=out.stride(1),
        **launch(head, q.dtype, rows),
        WIDEN=triton.knobs.runtime.interpret and q.dtype == torch.bfloat16,  # the interpreter cannot multiply these
    )
    return out


def launch(head: int, dtype: torch.dtype, rows: int) -> dict[str, Any]:
    """Constants and options of a launch. Tiles must fit into shared memory, and accumulators into registers."""
    padded = max(16, triton.next_power_of_2(head))
    exact = dtype == torch.float32  # no tensor cores, so twice the warps for half the keys
    return {
        "HEAD": head,
        "PADDED": padded,
        "ROWS": rows,
        "KEYS": 16 if exact else 64 if padded <= 128 else 32,
        "PRECISION": "ieee" if exact else "tf32",
        "num_warps": rows // 16 * (2 if exact else 1),
        "num_stages": 1 if exact or padded > 128 else 2,
    }
