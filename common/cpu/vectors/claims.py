"""Atomic counters in memory that threads share, and what a waiting thread does."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from common.cpu.vectors.llvm import FLAG, LINE, WORD, Value, ask, at, declared, pointer

_ALIGNED = 8
"""Bytes."""


def _count_up(_: Any, _place: Any) -> Any:
    """Adds 1 to the int64 at an address and returns what it was. Whoever reads the new value also sees what this thread
    wrote before."""

    def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        return builder.atomic_rmw("add", pointer(builder, given[0], WORD), WORD(1), "acq_rel")

    return types.intp(types.intp), generate


def _counted(_: Any, _place: Any) -> Any:
    """The int64 at an address, as the last thread to count left it."""

    def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        return builder.load_atomic(pointer(builder, given[0], WORD), "acquire", _ALIGNED)

    return types.intp(types.intp), generate


def _pause(_: Any) -> Any:
    """Leaves the core to its other thread for a moment."""

    def generate(context: Any, builder: Any, _signature: Any, _given: Any) -> Value:
        builder.call(declared(builder, "llvm.x86.sse2.pause", ir.VoidType(), []), [])
        return context.get_dummy_value()

    return types.void(), generate


def _let_others_run(_: Any) -> Any:
    """Yields the core to other threads that are ready to run."""

    def generate(context: Any, builder: Any, _signature: Any, _given: Any) -> Value:
        builder.call(declared(builder, "sched_yield", FLAG, []), [])
        return context.get_dummy_value()

    return types.void(), generate


def _ask_lines(_: Any, _place: Any, _lines: Any) -> Any:
    """Prefetches cache lines from an address on."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        place, lines = given
        with cgutils.for_range(builder, lines) as loop:
            ask(builder, at(builder, place, loop.index, WORD(LINE)))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


count_up: Any = intrinsic(_count_up)
counted: Any = intrinsic(_counted)
pause: Any = intrinsic(_pause)
let_others_run: Any = intrinsic(_let_others_run)
ask_lines: Any = intrinsic(_ask_lines)
