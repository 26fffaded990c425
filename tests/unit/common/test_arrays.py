"""Arrays for kernels begin where processors like it."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from common.cpu.arrays import lined

LARGE = 1 << 21


def large_pages() -> int:
    """Bytes of this process that lie in large pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))


@pytest.mark.parametrize(
    ("shape", "boundary"), [((3, 5), 64), ((LARGE - 1,), 64), ((LARGE,), LARGE), ((3, LARGE + 7), LARGE)]
)
def test_arrays_begin_with_a_line_and_large_ones_with_a_large_page(shape: tuple[int, ...], boundary: int) -> None:
    array = lined(shape, np.uint8)
    assert array.shape == shape
    assert array.ctypes.data % boundary == 0
    array[:] = 7
    assert (array == 7).all()


def test_large_arrays_lie_in_large_pages_where_there_are_any() -> None:
    before = large_pages()
    control = mmap.mmap(-1, 8 * LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    control.madvise(mmap.MADV_HUGEPAGE)
    control.write(bytes(8 * LARGE))
    if large_pages() == before:
        pytest.skip("Linux gives none here")
    for _ in range(3):
        np.ones(3 * LARGE, np.uint8)  # memory that the heap has again
    before, arrays = large_pages(), [lined((3 * LARGE,), np.uint8) for _ in range(4)]
    for array in arrays:
        array[:] = 1
    assert large_pages() > before


def test_a_kernel_that_knows_no_large_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345)
    assert lined((LARGE,), np.uint8).ctypes.data % LARGE == 0
