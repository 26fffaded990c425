"""Loops over the numbers of a row in order, by vectors of 16, the last of which may be partial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from common.cpu.vectors.llvm import (
    FLAG,
    FLOAT,
    LANES,
    SINGLE,
    VECTOR,
    WHOLE,
    WORD,
    Value,
    at,
    constant,
    declared,
    load,
    places,
    pointer,
    spread_whole,
    store,
)

MASK = ir.VectorType(ir.IntType(1), LANES)
_SUMS = 4
"""Vectors that a total is summed in, since one would wait for itself."""

Mask = Value | None
"""The lanes that hold numbers; None: all."""


def over(builder: Any, count: Value, step: Callable[[Value, Mask], None]) -> None:
    """Writes one step for the whole vectors of `count` numbers and one for the rest; each gets the index of its first
    number."""
    whole = builder.sdiv(count, WORD(LANES))
    with cgutils.for_range(builder, whole) as loop:
        step(builder.mul(loop.index, WORD(LANES)), None)
    first = builder.mul(whole, WORD(LANES))
    left = builder.sub(count, first)
    with builder.if_then(builder.icmp_signed(">", left, WORD(0))):
        lanes = ir.Constant(WHOLE, list(range(LANES)))
        step(first, builder.icmp_signed("<", lanes, spread_whole(builder, builder.trunc(left, FLAG))))


def load_wide(builder: Any, base: Value, first: Value, mask: Mask) -> Value:
    """Loads as float32; lanes outside of the mask are 0."""
    place = at(builder, base, first, WORD(FLOAT))
    if mask is None:
        return load(builder, place, VECTOR)
    masked = declared(builder, "llvm.masked.load.v16f32.p0", VECTOR, [VECTOR.as_pointer(), FLAG, MASK, VECTOR])
    return builder.call(masked, [pointer(builder, place, VECTOR), FLAG(FLOAT), mask, constant(0.0)])


def store_wide(builder: Any, value: Value, base: Value, first: Value, mask: Mask) -> None:
    """float32."""
    place = at(builder, base, first, WORD(FLOAT))
    if mask is None:
        store(builder, value, place)
    else:
        kinds = [VECTOR, VECTOR.as_pointer(), FLAG, MASK]
        masked = declared(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), kinds)
        builder.call(masked, [value, pointer(builder, place, VECTOR), FLAG(FLOAT), mask])


def total(builder: Any, count: Value, term: Callable[[Value, Mask], Value]) -> Value:
    """The sum of a term over `count` numbers."""
    sums = [cgutils.alloca_once_value(builder, constant(0.0)) for _ in range(_SUMS)]
    fours = builder.sdiv(count, WORD(_SUMS * LANES))
    with cgutils.for_range(builder, fours) as loop:
        for part, place in enumerate(sums):
            first = builder.add(builder.mul(loop.index, WORD(_SUMS * LANES)), WORD(part * LANES))
            builder.store(builder.fadd(builder.load(place), term(first, None)), place)
    behind = builder.mul(fours, WORD(_SUMS * LANES))

    def step(first: Value, mask: Mask) -> None:
        here = term(builder.add(behind, first), mask)
        builder.store(builder.fadd(builder.load(sums[0]), here), sums[0])

    over(builder, builder.sub(count, behind), step)
    first, *others = map(builder.load, sums)
    for other in others:
        first = builder.fadd(first, other)
    width = LANES
    while width > 1:  # a reduction of LLVM's has an order of its own in each kernel
        width //= 2
        upper = builder.shuffle_vector(first, first, places(range(width, 2 * width)))
        lower = builder.shuffle_vector(first, first, places(range(width)))
        first = builder.fadd(lower, upper)
    return builder.extract_element(first, FLAG(0))


def inverse_root(builder: Any, count: Value, square: Callable[[Value, Mask], Value], eps: Value) -> Value:
    """1 / √(mean of `count` squares + eps)."""
    share = builder.fdiv(SINGLE(1.0), builder.sitofp(count, SINGLE))
    mean = builder.fadd(builder.fmul(total(builder, count, square), share), eps)
    root = builder.call(declared(builder, "llvm.sqrt.f32", SINGLE, [SINGLE]), [mean])
    return builder.fdiv(SINGLE(1.0), root)
