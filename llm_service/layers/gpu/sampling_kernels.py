"""Sampling in Triton, without waiting for the host: adjusting a row of logits, and the draw itself.

The `HEAD` highest logits of each row are known in order, by torch's top-k, and nearly always contain everything that
may be drawn. Where they do not, the program of that row scans its whole vocabulary; the others do not.
"""

from __future__ import annotations

import triton
import triton.language as tl

HEAD = 1024
"""How many of a row's highest values are looked at first."""
ADJUST, DRAW = 8, 6
"""Numbers that a row has in the tables of `adjust_kernel` and `draw_kernel`."""


@triton.jit(do_not_specialize=["mask_bytes"])  # 0 where a step has no grammar
def adjust_kernel(
    logits,
    table,
    counts,
    masks,
    stride,
    vocabulary,
    mask_bytes,
    LARGEST: tl.constexpr,
    SEEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Applies penalties, then a grammar's mask, in place. Grid [rows, vocabulary / BLOCK]; rows of logits are `stride`
    elements apart.

    `table` float64 [rows, 8]: the row, its row in `counts` and in `masks` (−1: none), and the penalties for repetition,
    presence and frequency. `counts` int32 [, vocabulary]: how often a token was sampled, plus SEEN if it is in the
    prompt. `masks` uint8 [, mask_bytes]: one bit for each token, little-endian.
    """
    own = table + tl.program_id(0) * 8
    row = tl.load(own).to(tl.int64)
    counted = tl.load(own + 1).to(tl.int64)
    masked = tl.load(own + 2).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    place = logits + row * stride + token
    score = tl.load(place, inside, 0.0)
    if counted >= 0:
        count = tl.load(counts + counted * vocabulary + token, inside, 0)
        said = count % SEEN
        rate = tl.load(own + 3).to(tl.float32)
        repeated = tl.where(score < 0, score * rate, tl.math.div_rn(score, rate))
        score = tl.where(count > 0, tl.minimum(repeated, LARGEST), score)
        rest = tl.load(own + 4).to(tl.float32) + tl.load(own + 5).to(tl.float32) * said.to(tl.float32)
        score = tl.where(said > 0, score - rest, score)
    if masked >= 0:
        octet = tl.load(masks + masked * mask_bytes + token // 8, inside, 0).to(tl.int32)
        score = tl.where((octet >> (token % 8)) & 1 > 0, score, float("-inf"))
    tl.store(place, score, inside)


@triton.jit
def _order(score):
    """float32 → int64 numbers in the same order."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # of the two zeros one
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _terms(score, highest, scale):
    """The logarithm of a token's weight, 0 for the likeliest one's, and the weight."""
    value = (score - highest) * scale
    return value, tl.exp(value)


@triton.jit
def _count(row, bound, vocabulary, BLOCK: tl.constexpr):
    """How many scores are at `bound` or above."""
    found = tl.full([], 0, tl.int64)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        score = tl.load(row + token, token < vocabulary, 0.0)
        found += tl.sum(((_order(score) >= bound) & (token < vocabulary)).to(tl.int64), 0)
    return found


@triton.jit
def _mass(row, bound, highest, scale, vocabulary, BLOCK: tl.constexpr):
    """float64: the weights of all scores at `bound` or above."""
    found = tl.full([], 0.0, tl.float64)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        score = tl.load(row + token, token < vocabulary, 0.0)
        _, weight = _terms(score, highest, scale)
        found += tl.sum(tl.where((_order(score) >= bound) & (token < vocabulary), weight, 0.0), 0).to(tl.float64)
    return found


@triton.jit
def _bound(row, top_k, top_p, highest, scale, vocabulary, BLOCK: tl.constexpr):
    """The lowest score, in the order of `_order`, that top-k and top-p keep. Found by bisection: a higher bound keeps
    fewer scores and less mass."""
    low = tl.full([], -(1 << 31), tl.int64)
    if top_k < vocabulary:
        high = tl.full([], (1 << 31) - 1, tl.int64)
        for _ in range(32):  # the highest bound that still keeps top_k scores
            middle = (low + high + 1) >> 1
            enough = _count(row, middle, vocabulary, BLOCK) >= top_k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
    if top_p < 1.0:
        share = top_p * _mass(row, low, highest, scale, vocabulary, BLOCK)
        high = _order(highest)
        for _ in range(32):  # the lowest bound above which there is less than the share
            middle = (low + high) >> 1
            less = _mass(row, middle + 1, highest, scale, vocabulary, BLOCK) < share
            high = tl.where(less, middle, high)
            low = tl.where(less, low, middle + 1)
        low = high
    return low


@triton.jit
def _whole(row, chance, top_k, top_p, least, highest, scale, vocabulary, BLOCK: tl.constexpr):
    """The token drawn from all of a vocabulary."""
    bound = _bound(row, top_k, top_p, highest, scale, vocabulary, BLOCK)
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        score = tl.load(row + token, token < vocabulary, float("-inf"))
        value, weight = _terms(score, highest, scale)
        kept = (_order(score) >= bound) & (value >= least) & (token < vocabulary)
        total += tl.sum(tl.where(kept, weight, 0.0), 0).to(tl.float64)
    share = chance * total
    before = tl.full([], 0.0, tl.float64)
    chosen = tl.full([], -1, tl.int32)
    last = tl.full([], 0, tl.int32)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        score = tl.load(row + token, token < vocabulary, float("-inf"))
        value, weight = _terms(score, highest, scale)
        kept = (_order(score) >= bound) & (value >= least) & (token < vocabulary)
        weight = tl.where(kept, weight, 0.0)
        here = tl.sum(weight, 0).to(tl.float64)
        own = tl.max(tl.where(weight > 0.0, token, 0), 0)
        if (chosen < 0) & (before + here > share):
            passed = before + tl.cumsum(weight, 0).to(tl.float64) > share
            chosen = tl.minimum(tl.min(tl.where(passed & kept, token, vocabulary), 0), own)
        last = tl.maximum(last, own)
        before += here
    return tl.where(chosen < 0, last, chosen)


@triton.jit(do_not_specialize=["heads"])  # 1 where nothing is cut off
def draw_kernel(
    tokens,
    logits,
    values,
    places,
    table,
    stride,
    vocabulary,
    heads,
    COUNT: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Samples one token for each row of the table, by inverse CDF over its vocabulary in order. Grid [rows].

    `values` float32 and `places` int64 [rows, heads] are the highest logits of each row, in descending order; rows of
    logits are `stride` elements apart. `table` float64 [rows, 6]: the row of `logits` and of `tokens` int64, 1 /
    temperature, the uniform number in [0, 1), top-k (the vocabulary size for none), top-p, and log min-p. As in
    transformers, each filter applies to what the one before kept, and tokens that tie with the last one kept are kept.
    """
    program = tl.program_id(0).to(tl.int64)
    own = table + program * 6
    scale = tl.load(own + 1).to(tl.float32)
    chance = tl.load(own + 2)
    top_k = tl.load(own + 3).to(tl.int64)
    top_p = tl.load(own + 4)
    least = tl.load(own + 5).to(tl.float32)
    row = logits + tl.load(own).to(tl.int64) * stride

    place = tl.arange(0, COUNT)
    inside = place < heads
    there = program * heads + tl.minimum(place, heads - 1)
    head = tl.load(values + there)
    token = tl.load(places + there).to(tl.int32)
    highest = tl.max(head, 0)
    value, weight = _terms(head, highest, scale)
    weight = tl.where(inside, weight, 0.0)
    lowest = tl.max(tl.where(place == heads - 1, head, float("-inf")), 0)

    # Tokens behind the head may be drawn only if the head's last value may be, or top-k counts farther than the head
    # goes.
    last = tl.max(tl.where(place == top_k - 1, head, float("-inf")), 0)  # -inf where top-k keeps all of the head
    within = inside & (head >= last)
    mass = tl.sum(tl.where(within, weight, 0.0), 0).to(tl.float64)
    if (top_p < 1.0) & (top_k >= vocabulary):
        mass = _mass(row, tl.full([], -(1 << 31), tl.int64), highest, scale, vocabulary, BLOCK)
    before = (tl.cumsum(weight, 0) - weight).to(tl.float64)
    share = tl.where(top_p < 1.0, top_p * mass, float("inf"))
    count = tl.sum((within & (before < share)).to(tl.int32), 0)
    bound = tl.max(tl.where(place == tl.maximum(count, 1) - 1, head, float("-inf")), 0)
    kept = inside & (head >= bound) & (value >= least)
    reaches = tl.sum((kept & (head == lowest)).to(tl.int32), 0) > 0
    unknown = (top_p < 1.0) & (top_k > heads) & (top_k < vocabulary)

    if (reaches | unknown) & (heads < vocabulary):
        chosen = _whole(row, chance, top_k, top_p, least, highest, scale, vocabulary, BLOCK)
    else:
        weight = tl.where(kept, weight, 0.0)
        share = chance * tl.sum(weight, 0).to(tl.float64)
        low = tl.full([], 0, tl.int32)
        high = tl.max(tl.where(weight > 0.0, token, 0), 0)
        for _ in range(BITS):  # the first token at which the sum is above the share
            middle = (low + high) >> 1
            above = tl.sum(tl.where(token <= middle, weight, 0.0), 0).to(tl.float64) > share
            high = tl.where(above, middle, high)
            low = tl.where(above, low, tl.minimum(middle + 1, high))
        chosen = high
    tl.store(tokens + tl.load(own).to(tl.int64), tl.minimum(chosen, vocabulary - 1).to(tl.int64))
