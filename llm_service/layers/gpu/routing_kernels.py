"""Routing of rows to experts and back, in Triton: three kernels instead of about fifteen operators, whose launches take
longer than their work where rows are few. See `RowOps`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llm_service.layers.gpu.row_kernels import whole_rows
from llm_service.layers.ops import Pair, Routes

_BLOCK = 1024
"""Choices that are read at once, and the elements of a row that one program sums."""


@triton.jit
def route_kernel(
    weights, chosen, logits, row, experts, PER_TOKEN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """The PER_TOKEN likeliest experts of a row and their weights, the first of equal ones first. Grid [rows]; rows of
    `logits` are `row` apart. A row that is not finite is given the first ones, with weights that are no numbers."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    place = tl.arange(0, WIDTH)
    own = tl.load(logits + token * row + expert, expert < experts, float("-inf")).to(tl.float32)
    likely = tl.exp(own - tl.max(own, 0))
    likely = likely / tl.sum(likely, 0)
    broken = tl.sum(likely, 0)
    likely = tl.where(expert < experts, tl.where(likely == likely, likely, 0.0), -1.0)
    found = tl.zeros([WIDTH], tl.float32)
    total = broken - broken  # 0, or no number
    for n in tl.static_range(PER_TOKEN):
        most, best = tl.max(likely, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(chosen + token * PER_TOKEN + n, best)
        found = tl.where(place == n, most, found)
        total += most
        likely = tl.where(expert == best, -1.0, likely)
    result = (found / total).to(weights.dtype.element_ty)
    tl.store(weights + token * PER_TOKEN + place, result, place < PER_TOKEN)


@triton.jit
def _numbers(chosen, choice, count, first, experts):
    """int32: the local number of each choice if it is one of the `experts` from number `first` on; otherwise
    `experts`."""
    number = tl.load(chosen + choice, choice < count, -1).to(tl.int32) - first
    return tl.where((number < 0) | (number >= experts), experts, number)


@triton.jit(do_not_specialize=["count", "first", "experts"])
def sort_kernel(rows, places, ends, chosen, count, first, experts, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    """Sorts choices by expert: the rows of an expert are placed behind those of all experts before it, in order. Of
    `count` choices, those of the `experts` from number `first` on count. Grid [experts], and one more program if there
    are other experts, whose choices are placed behind all of these.

    Each program itself counts the choices that go before its own: reading all choices twice is cheaper than a second
    launch.
    """
    expert = tl.program_id(0)
    before = 0
    own = 0
    for start in range(0, count, BLOCK):
        other = _numbers(chosen, start + tl.arange(0, BLOCK), count, first, experts)
        before += tl.sum((other < expert).to(tl.int32), 0)
        own += tl.sum((other == expert).to(tl.int32), 0)
    tl.store(ends + expert, before + own, expert < experts)
    for start in range(0, count, BLOCK):
        choice = start + tl.arange(0, BLOCK)
        other = _numbers(chosen, choice, count, first, experts)
        mine = ((other == expert) & (choice < count)).to(tl.int32)
        place = before + tl.cumsum(mine, 0) - 1
        tl.store(rows + place, choice // PER_TOKEN, mine > 0)
        tl.store(places + choice, tl.where(expert < experts, place, -1), mine > 0)
        before += tl.sum(mine, 0)


@triton.jit
def weighted_sum_kernel(out, x, places, weights, size, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    """The weighted sum of each token's PER_TOKEN rows of x; a row whose place is below 0 is skipped. Grid [tokens, size
    / BLOCK]; rows are contiguous."""
    token = tl.program_id(0).to(tl.int64)
    dim = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for n in tl.static_range(PER_TOKEN):
        place = tl.load(places + token * PER_TOKEN + n).to(tl.int64)
        weight = tl.load(weights + token * PER_TOKEN + n).to(tl.float32)
        own = tl.load(x + place * size + dim, (dim < size) & (place >= 0), 0.0).to(tl.float32)
        part = (own * weight).to(x.dtype.element_ty).to(tl.float32)  # torch rounds it as well
        total += tl.where(place >= 0, part, 0.0)
    tl.store(out + token * size + dim, total.to(out.dtype.element_ty), dim < size)


def route(logits: Tensor, per_token: int) -> Pair:
    """See `RowOps`."""
    (n, experts), logits = logits.shape, whole_rows(logits)
    weights = torch.empty((n, per_token), dtype=logits.dtype, device=logits.device)
    chosen = torch.empty((n, per_token), dtype=torch.int32, device=logits.device)
    sizes = {"WIDTH": triton.next_power_of_2(per_token), "BLOCK": triton.next_power_of_2(experts)}
    route_kernel[(n,)](weights, chosen, logits, logits.stride(0), experts, PER_TOKEN=per_token, num_warps=1, **sizes)
    return weights, chosen


def sort_by_expert(chosen: Tensor, experts: int, own: slice | None = None) -> Routes:
    """See `RowOps`."""
    first, here = (0, experts) if own is None else (own.start, own.stop - own.start)
    rows, places = torch.empty((2, chosen.numel()), dtype=torch.int32, device=chosen.device)
    ends = torch.empty(here, dtype=torch.int32, device=chosen.device)
    sort_kernel[(here + (here < experts),)](
        *(rows, places, ends, chosen.contiguous()),
        *(chosen.numel(), first, here),
        PER_TOKEN=chosen.shape[1],
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return Routes(rows, places, ends)


def weighted_sum(x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """See `RowOps`."""
    (n, per_token), size = weights.shape, x.shape[1]
    x, places, weights = (each.contiguous() for each in (x, places, weights))
    out = torch.empty((n, size), dtype=x.dtype, device=x.device)
    weighted_sum_kernel[(n, triton.cdiv(size, _BLOCK))](
        out, x, places, weights, size, PER_TOKEN=per_token, BLOCK=_BLOCK, num_warps=4
    )
    return out
