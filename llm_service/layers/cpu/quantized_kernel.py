"""Quantised weights (`llm_service.layers.quantized_weight`) made float32, compiled by numba: an output at a time, by a
table of what a byte's numbers are. Few rows are multiplied while an output's weights are in the first-level cache; for
many, some outputs are written to memory, and torch multiplies."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from llm_service.layers.cpu.jit import Array, Typed, compiled, inner

FEW = 8
"""Rows up to which an output is multiplied as soon as it is wide."""


@inner
def _widen(wide: Any, codes: Any, table: Any, scale: Any, zero: Any, groups: Any, columns: Any, first: Any) -> None:
    """float32 wide [inputs], uint8 codes [bytes], table float32 [256, numbers of a byte], scale and zero float32
    [groups of inputs]; `groups` int32 [inputs] or [0]."""
    each, inputs = table.shape[1], len(wide)
    if each == 1:
        for place in range(inputs):
            wide[place] = table[codes[place], 0]
    else:
        for byte in range(inputs // 2):
            wide[2 * byte] = table[codes[byte], 0]
            wide[2 * byte + 1] = table[codes[byte], 1]
        if inputs % 2:
            wide[inputs - 1] = table[codes[inputs // 2], 0]
    if len(groups):
        for place in range(inputs):
            wide[place] = (wide[place] - zero[groups[place]]) * scale[groups[place]]
        return
    begin = 0
    for group in range(len(scale)):
        end = min(inputs, (group + 1) * columns - first)
        for place in range(begin, end):
            wide[place] = (wide[place] - zero[group]) * scale[group]
        begin = end


def _wide(out: Any, codes: Any, table: Any, scale: Any, zero: Any, groups: Any, sizes: Any) -> None:
    """float32 out [outputs, inputs]; scale and zero [groups of outputs, groups of inputs]; `sizes` are a group's
    outputs and inputs, and the places of the first of each in theirs."""
    for output in numba.prange(codes.shape[0]):
        group = (output + sizes[2]) // sizes[0]
        _widen(out[output], codes[output], table, scale[group], zero[group], groups, sizes[1], sizes[3])


def _product(out: Any, x: Any, codes: Any, table: Any, scale: Any, zero: Any, groups: Any, sizes: Any) -> None:
    """float32 out [m, outputs], x [m, inputs]; the others as in `_wide`. A task has 16 outputs."""
    outputs, inputs = codes.shape[0], x.shape[1]
    for task in numba.prange((outputs + 15) // 16):
        wide = np.empty(inputs, np.float32)
        for output in range(task * 16, min(outputs, task * 16 + 16)):
            group = (output + sizes[2]) // sizes[0]
            _widen(wide, codes[output], table, scale[group], zero[group], groups, sizes[1], sizes[3])
            for row in range(x.shape[0]):
                total = np.float32(0.0)
                for place in range(inputs):
                    total += x[row, place] * wide[place]
                out[row, output] = total


_matrix = numba.float32[:, ::1]
_weight = (numba.uint8[:, ::1], _matrix, _matrix, _matrix, numba.int32[::1], numba.types.UniTuple(numba.intp, 4))
TYPED = {
    "wide": Typed(compiled(_wide), (_matrix, *_weight)),
    "product": Typed(compiled(_product), (_matrix, _matrix, *_weight)),
}
Weight = tuple[Array, Array, Array, Array, Array, tuple[int, int, int, int]]
"""codes, table, scale, zero, groups and sizes, as the kernels take them."""


def wide(out: Array, weight: Weight) -> None:
    """Fills out float32 [outputs, inputs]."""
    TYPED["wide"].kernel(out, *weight)


def product(out: Array, x: Array, weight: Weight) -> None:
    """Fills out float32 [m, outputs] with x [m, inputs] · weightᵀ."""
    TYPED["product"].kernel(out, x, *weight)
