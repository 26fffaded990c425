"""Products of pairs by tiles: sums of any number of rows, one block or two, and who may compute them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numba
import numpy as np
import pytest
import torch

from common.cpu.vectors.tiles import BLOCK, add_tiles, configure_tiles, multiply_tiles, release_tiles, round_row
from common.hardware import multiplies_bfloat16, multiplies_tiles

tiled = pytest.mark.skipif(not multiplies_tiles(), reason="this processor lacks AMX")
STEPS = 3


@numba.njit
def _add(out: Any, x: Any, weights: Any, rows: Any) -> None:
    configure_tiles(rows)
    row = x.shape[1] * 4
    places = (out.ctypes.data, 256, x.ctypes.data, row, weights.ctypes.data, 256, weights.ctypes.data)
    add_tiles(1, 4, 1, places, x.shape[1] // 16)
    release_tiles()


@numba.njit
def _multiply(out: Any, x: Any, weights: Any, rows: Any) -> None:
    configure_tiles(rows)
    row = x.shape[1] * 4
    places = (out.ctypes.data, 256, x.ctypes.data, row, weights.ctypes.data, 256, weights.ctypes.data)
    multiply_tiles(1, 4, 0, places, x.shape[1] // 16)
    release_tiles()


@numba.njit
def _round(out: Any, x: Any) -> None:
    round_row(out.ctypes.data, x.ctypes.data, len(x) // 32)


@numba.njit
def _add_two(out: Any, x: Any, weights: Any) -> None:
    configure_tiles(16)
    row = x.shape[1] * 4
    for part in range(2):
        to, of = out.ctypes.data + part * 128, weights.ctypes.data + part * 128
        add_tiles(2, 2, 0, (to, 256, x.ctypes.data, row, of, 256, of), x.shape[1] // 16)
    release_tiles()


def words(numbers: torch.Tensor) -> np.ndarray:
    """bfloat16 [n, 2 k] as uint32 [n, k]."""
    return numbers.view(torch.int16).numpy().view(np.uint32)


def drawn(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and a weight [64, inputs], in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(many, STEPS * 2 * BLOCK, generator=generator).bfloat16() for many in (rows, 64))


def paired(weight: torch.Tensor) -> np.ndarray:
    """uint32 [pairs, outputs] of a weight [outputs, inputs]."""
    return np.ascontiguousarray(words(weight).T)


@tiled
@pytest.mark.parametrize("rows", [1, 2, 9, 15, 16])
def test_products_of_pairs_are_added_to_sums_of_these_rows_alone(rows: int) -> None:
    x, weight = drawn(BLOCK)
    out = np.ones((BLOCK, 64), np.float32)
    _add(out, words(x), paired(weight), rows)
    expected = (x[:rows].double() @ weight.double().T + 1).numpy()
    np.testing.assert_allclose(out[:rows], expected, rtol=1e-5, atol=1e-4)
    assert (out[rows:] == 1).all()
    again = np.full((BLOCK, 64), np.nan, np.float32)
    _multiply(again, words(x), paired(weight), rows)
    np.testing.assert_allclose(again[:rows], expected - 1, rtol=1e-5, atol=1e-4)
    assert np.isnan(again[rows:]).all()


@pytest.mark.skipif(not multiplies_bfloat16(), reason="this processor lacks AVX512-BF16")
def test_rows_are_rounded_as_torch_rounds_them() -> None:
    x = torch.randn(128, generator=torch.Generator().manual_seed(1))
    x[:5] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, torch.inf, -0.0])
    x.view(torch.int32)[5] = 0x7FFFFFFF  # not a number, which rounding alone would make -0 of
    out = np.zeros(64, np.uint32)
    _round(out, x.numpy())
    given = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)
    torch.testing.assert_close(given, x.bfloat16(), rtol=0, atol=0, equal_nan=True)


@tiled
def test_two_blocks_have_the_sums_of_each() -> None:
    x, weight = drawn(2 * BLOCK)
    both, each = np.zeros((2 * BLOCK, 64), np.float32), np.zeros((2 * BLOCK, 64), np.float32)
    _add_two(both, words(x), paired(weight))
    for row in range(2 * BLOCK):
        _add(each[row : row + 1], words(x[row : row + 1]), paired(weight), 1)
    np.testing.assert_allclose(both, (x.double() @ weight.double().T).numpy(), rtol=1e-5, atol=1e-4)
    assert (both == each).all()


FORKS = """
import os
import numpy as np
from tests.unit.common.test_tiles import BLOCK, _add, drawn, paired, words  # has asked
child = os.fork()
if not child:
    x, weight = drawn(BLOCK)
    _add(np.zeros((BLOCK, 64), np.float32), words(x), paired(weight), BLOCK)
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@tiled
def test_a_forked_child_may_use_them_where_its_parent_has_asked() -> None:
    assert subprocess.run([sys.executable, "-c", FORKS], check=False).returncode == 0
