"""Triton kernels that score all tokens of sequences, pools of them, or blocks, by their index keys, over a paged cache.
They read no more than a sequence has, however long others may be."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llm_service.layers.attention.metadata import AttentionMetadata
from llm_service.layers.sparse_attention.index import IndexQuery

_AT_ONCE, _EXACT_AT_ONCE = 64, 16
"""Tokens that a program takes at once; in float32 fewer, because the operands are held in registers."""
_PROGRAMS = 64
"""The most programs of a sequence. Each takes every `_PROGRAMS`-th block of tokens."""


@triton.jit(do_not_specialize=["table_stride", "longest"])  # they change; otherwise each new value compiles
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
    KEPT: tl.constexpr,
    POOL: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Index scores of a sequence's tokens: the sum over HEADS of weights · max(0, scale · query · key). Grid
    [sequences, programs].

    POOL tokens share one score, by the key of the last of them; tokens behind the last whole pool have none. The cache
    holds KEPT numbers of each token, of which WIDTH are its key.
    """
    sequence = tl.program_id(0).to(tl.int64)
    count = tl.load(lengths + sequence) // POOL
    heads, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    inside = (heads < HEADS)[:, None] & (dims < WIDTH)[None, :]
    first = sequence * HEADS
    q = tl.load(query + (first + heads)[:, None] * WIDTH + dims[None, :], inside, 0.0)
    each = tl.load(weights + first + heads, heads < HEADS, 0.0)
    for start in range(tl.program_id(1) * BLOCK_N, count, tl.num_programs(1) * BLOCK_N):
        numbers = start + tl.arange(0, BLOCK_N)
        there, positions = numbers < count, numbers * POOL + (POOL - 1)
        block = tl.load(block_table + sequence * table_stride + positions // BLOCK_SIZE, there, 0)
        slot = block.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE  # a cache may hold more than 2³¹ numbers
        k = tl.load(keys + slot[:, None] * KEPT + dims[None, :], there[:, None] & (dims < WIDTH)[None, :], 0.0)
        products = tl.dot(q, tl.trans(k).to(q.dtype), input_precision=PRECISION) * scale
        scores = tl.sum(tl.maximum(products, 0.0) * each[:, None], 0)
        tl.store(out + sequence * longest + numbers, scores, there)


def constants(
    heads: int, width: int, block_size: int, dtype: torch.dtype, *, kept: int = 0, pool: int = 1
) -> dict[str, int | str]:
    """Constants and options of the kernel; a token has `kept` numbers in the cache, 0: a key alone."""
    exact = dtype == torch.float32  # no tensor cores
    return {
        "HEADS": heads,
        "WIDTH": width,
        "KEPT": kept or width,
        "POOL": pool,
        "ROWS": max(16, int(triton.next_power_of_2(heads))),
        "DIMS": max(16, int(triton.next_power_of_2(width))),
        "BLOCK_SIZE": block_size,
        "BLOCK_N": _EXACT_AT_ONCE if exact else _AT_ONCE,
        "PRECISION": "ieee" if exact else "tf32",
        "num_warps": 16 if exact else 4,
        "num_stages": 1 if exact else 2,
    }


def score_tokens(asked: IndexQuery, cache: Tensor, metadata: AttentionMetadata, pool: int = 1) -> Tensor:
    """See `token_decodes.ScoreTokens`."""
    assert asked.weights is not None, "heads count by weights"
    count, heads, width = asked.query.shape
    longest = metadata.longest // pool
    out = torch.empty(count, longest, dtype=torch.float32, device=cache.device)
    score_tokens_kernel[(count, max(1, min(_PROGRAMS, -(-longest // _AT_ONCE))))](
        out,
        asked.query.contiguous(),
        asked.weights.contiguous(),
        cache,
        metadata.block_table,
        metadata.seq_lens,
        asked.scale,
        metadata.block_table.stride(0),
        longest,
        **constants(heads, width, cache.shape[1], asked.query.dtype, kept=cache.shape[2], pool=pool),
    )
    return out


@triton.jit(do_not_specialize=["table_stride", "many"])  # as above
def score_blocks_kernel(
    out,
    query,
    keys,
    block_table,
    lengths,
    table_stride,
    many,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of each of HEADS the highest product of its query with a key in each stretch of SIZE tokens of a sequence. Grid
    [sequences, programs]; out [sequences, HEADS, many]."""
    sequence = tl.program_id(0).to(tl.int64)
    count = tl.load(lengths + sequence)
    heads, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    inside = (heads < HEADS)[:, None] & (dims < WIDTH)[None, :]
    first = sequence * HEADS
    q = tl.load(query + (first + heads)[:, None] * WIDTH + dims[None, :], inside, 0.0)
    for stretch in range(tl.program_id(1), (count + SIZE - 1) // SIZE, tl.num_programs(1)):
        highest = tl.full((ROWS,), float("-inf"), tl.float32)
        for start in tl.static_range(0, SIZE, BLOCK_N):
            within = start + tl.arange(0, BLOCK_N)
            positions = stretch * SIZE + within
            there = (within < SIZE) & (positions < count)
            block = tl.load(block_table + sequence * table_stride + positions // BLOCK_SIZE, there, 0)
            slot = block.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE  # a cache may hold more than 2³¹ numbers
            k = tl.load(keys + slot[:, None] * WIDTH + dims[None, :], there[:, None] & (dims < WIDTH)[None, :], 0.0)
            products = tl.dot(q, tl.trans(k).to(q.dtype), input_precision=PRECISION)
            highest = tl.maximum(highest, tl.max(tl.where(there[None, :], products, float("-inf")), 1))
        tl.store(out + (first + heads) * many + stretch, highest, heads < HEADS)


def block_constants(heads: int, width: int, size: int, block_size: int, dtype: torch.dtype) -> dict[str, int | str]:
    """Constants and options of the kernel, for stretches of `size` tokens."""
    made = constants(heads, width, block_size, dtype)
    return {name: value for name, value in made.items() if name not in ("KEPT", "POOL")} | {"SIZE": size}


def score_blocks(asked: IndexQuery, cache: Tensor, metadata: AttentionMetadata, size: int) -> Tensor:
    """See `block_decodes.ScoreBlocks`."""
    count, heads, width = asked.query.shape
    many = -(-metadata.longest // size)
    out = torch.empty(count, heads, many, dtype=torch.float32, device=cache.device)
    score_blocks_kernel[(count, min(_PROGRAMS, many))](
        out,
        asked.query.contiguous(),
        cache,
        metadata.block_table,
        metadata.seq_lens,
        metadata.block_table.stride(0),
        many,
        **block_constants(heads, width, size, cache.shape[1], asked.query.dtype),
    )
    return out
