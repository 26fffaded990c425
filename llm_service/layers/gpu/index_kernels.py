"""A Triton kernel that scores all tokens of sequences by their index keys, over a paged cache. It reads no more than a
sequence has, however long others may be."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llm_service.layers.attention.metadata import AttentionMetadata
from llm_service.layers.index_keys import IndexQuery

_AT_ONCE, _EXACT_AT_ONCE = 64, 16
"""Tokens that a program takes at once; the latter in float32, whose factors stand in registers."""
_PROGRAMS = 64
"""Of a sequence at the most: one of them takes the next tokens, then those so many behind."""


@triton.jit(do_not_specialize=["table_stride", "longest"])  # they change, and would be compiled anew
def score_tokens_kernel(
    out,
    query,
    weights,
    keys,
    block_table,
    lengths,
    scale,
    table_stride,
    longest,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of a sequence's tokens the sums, over HEADS, of weights · max(0, scale · query · key). Grid [sequences,
    programs]."""
    sequence = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + sequence)
    heads, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    inside = (heads < HEADS)[:, None] & (dims < WIDTH)[None, :]
    first = sequence * HEADS
    q = tl.load(query + (first + heads)[:, None] * WIDTH + dims[None, :], inside, 0.0)
    each = tl.load(weights + first + heads, heads < HEADS, 0.0)
    for start in range(tl.program_id(1) * BLOCK_N, length, tl.num_programs(1) * BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        there = positions < length
        block = tl.load(block_table + sequence * table_stride + positions // BLOCK_SIZE, there, 0)
        slot = block.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE  # a cache may hold more than 2³¹ numbers
        k = tl.load(keys + slot[:, None] * WIDTH + dims[None, :], there[:, None] & (dims < WIDTH)[None, :], 0.0)
        products = tl.dot(q, tl.trans(k).to(q.dtype), input_precision=PRECISION) * scale
        scores = tl.sum(tl.maximum(products, 0.0) * each[:, None], 0)
        tl.store(out + sequence * longest + positions, scores, there)


def constants(heads: int, width: int, block_size: int, dtype: torch.dtype) -> dict[str, int | str]:
    """Constants and options of the kernel."""
    exact = dtype == torch.float32  # no tensor cores
    return {
        "HEADS": heads,
        "WIDTH": width,
        "ROWS": max(16, int(triton.next_power_of_2(heads))),
        "DIMS": max(16, int(triton.next_power_of_2(width))),
        "BLOCK_SIZE": block_size,
        "BLOCK_N": _EXACT_AT_ONCE if exact else _AT_ONCE,
        "PRECISION": "ieee" if exact else "tf32",
        "num_warps": 16 if exact else 4,
        "num_stages": 1 if exact else 2,
    }


def score_tokens(asked: IndexQuery, cache: Tensor, metadata: AttentionMetadata) -> Tensor:
    """See `token_decode.ScoreTokens`."""
    assert asked.weights is not None, "heads count by weights"
    count, heads, width = asked.query.shape
    out = torch.empty(count, metadata.longest, dtype=torch.float32, device=cache.device)
    score_tokens_kernel[(count, min(_PROGRAMS, -(-metadata.longest // _AT_ONCE)))](
        out,
        asked.query.contiguous(),
        asked.weights.contiguous(),
        cache,
        metadata.block_table,
        metadata.seq_lens,
        asked.scale,
        metadata.block_table.stride(0),
        metadata.longest,
        **constants(heads, width, cache.shape[1], asked.query.dtype),
    )
    return out
