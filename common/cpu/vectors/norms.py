"""Norms by the mean square, and rotations, of rows of float32, the same to the bit in every kernel."""

from __future__ import annotations

from typing import Any

from numba.core import cgutils, types
from numba.extending import intrinsic

from common.cpu.jit import exact
from common.cpu.vectors.llvm import FLOAT, WORD, Value, share, spread
from common.cpu.vectors.row_loops import Mask, inverse_root, load_wide, over, store_wide


def _rms_norm(_: Any, _out: Any, _x: Any, _gain: Any, _count: Any, _eps: Any) -> Any:
    """RMS norm of `count` numbers, times a gain, written to an address, which may be their own."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        share(builder)
        out, x, gain, count, eps = given
        scale = spread(builder, _inverse_root(builder, x, count, eps))
        _write_scaled(builder, out, (x, gain), scale, count)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp, types.float32), generate


def _scale_of(_: Any, _x: Any, _count: Any, _eps: Any) -> Any:
    """The factor by which the norm multiplies `count` numbers at an address."""

    def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        share(builder)
        return _inverse_root(builder, *given)

    return types.float32(types.intp, types.intp, types.float32), generate


def _scaled(_: Any, _out: Any, _x: Any, _gain: Any, _count: Any, _scale: Any) -> Any:
    """Writes `count` numbers times a scale, times a gain."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        out, x, gain, count, scale = given
        _write_scaled(builder, out, (x, gain), spread(builder, scale), count)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp, types.float32), generate


def _rotate_scaled(_: Any, _out: Any, _x: Any, _gain: Any, _tables: Any, _half: Any, _scale: Any) -> Any:
    """The same of twice `half` numbers, the first half then rotated against the second, and written to another address.
    `tables` are the addresses of cosines and sines of the first half, and of the second."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        share(builder)
        out, x, gain, tables, half, scale = given
        behind, factor = builder.mul(half, WORD(FLOAT)), spread(builder, scale)

        def step(first: Value, mask: Mask) -> None:
            cos, sin, later_cos, later_sin = (
                load_wide(builder, table, first, mask) for table in cgutils.unpack_tuple(builder, tables)
            )
            one, other = (_part(builder, (x, gain), factor, (first, mask), more) for more in (WORD(0), behind))
            less = builder.fsub(builder.fmul(one, cos), builder.fmul(other, sin))
            more = builder.fadd(builder.fmul(other, later_cos), builder.fmul(one, later_sin))
            store_wide(builder, less, out, first, mask)
            store_wide(builder, more, builder.add(out, behind), first, mask)

        over(builder, half, step)
        return context.get_dummy_value()

    tables = types.UniTuple(types.intp, 4)
    return types.void(types.intp, types.intp, types.intp, tables, types.intp, types.float32), generate


def _add_rows(_: Any, _out: Any, _one: Any, _other: Any, _count: Any) -> Any:
    """Writes the sums of `count` pairs of numbers to an address, which may be one's own."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Value:
        out, one, other, count = given

        def step(first: Value, mask: Mask) -> None:
            both = (load_wide(builder, base, first, mask) for base in (one, other))
            store_wide(builder, builder.fadd(*both), out, first, mask)

        over(builder, count, step)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), generate


def _inverse_root(builder: Any, x: Value, count: Value, eps: Value) -> Value:
    def square(first: Value, mask: Mask) -> Value:
        part = load_wide(builder, x, first, mask)
        return builder.fmul(part, part)

    return inverse_root(builder, count, square, eps)


def _write_scaled(builder: Any, out: Value, bases: tuple[Value, Value], scale: Value, count: Value) -> None:
    def step(first: Value, mask: Mask) -> None:
        store_wide(builder, _part(builder, bases, scale, (first, mask), WORD(0)), out, first, mask)

    over(builder, count, step)


def _part(builder: Any, bases: tuple[Value, Value], scale: Value, place: tuple[Value, Mask], more: Value) -> Value:
    """A vector of x · scale · gain at a byte offset; `bases` are the addresses of x and the gain."""
    x, gain = (load_wide(builder, builder.add(base, more), *place) for base in bases)
    return builder.fmul(builder.fmul(x, scale), gain)


_rms_norm_code: Any = intrinsic(_rms_norm)
_scale_code: Any = intrinsic(_scale_of)
_scaled_code: Any = intrinsic(_scaled)
_rotate_code: Any = intrinsic(_rotate_scaled)
_add_code: Any = intrinsic(_add_rows)


@exact
def rms_norm(out: Any, x: Any, gain: Any, count: Any, eps: Any) -> None:
    """See `_rms_norm`."""
    _rms_norm_code(out, x, gain, count, eps)


@exact
def scale_of(x: Any, count: Any, eps: Any) -> Any:
    """See `_scale_of`."""
    return _scale_code(x, count, eps)


@exact
def scaled(out: Any, x: Any, gain: Any, count: Any, scale: Any) -> None:
    """See `_scaled`."""
    _scaled_code(out, x, gain, count, scale)


@exact
def rotate_scaled(out: Any, x: Any, gain: Any, tables: Any, half: Any, scale: Any) -> None:
    """See `_rotate_scaled`."""
    _rotate_code(out, x, gain, tables, half, scale)


@exact
def add_rows(out: Any, one: Any, other: Any, count: Any) -> None:
    """See `_add_rows`."""
    _add_code(out, one, other, count)
