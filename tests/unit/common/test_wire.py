"""Rows on the wire."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.rows.wire import CHUNK_BYTES, DType, RowLayout, all_finite, crc32c


def test_crc32c_is_castagnolis() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # RFC 3720, B.4 and the catalogue of CRCs
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(memoryview(b"\xff" * 32)) == 0x62A8AB43
    assert crc32c(b"") == 0


@pytest.mark.parametrize(("dtype", "size"), [(DType.FLOAT32, 4), (DType.BFLOAT16, 2), (DType.FLOAT16, 2)])
def test_a_row_is_levels_by_width_elements(dtype: DType, size: int) -> None:
    assert RowLayout(3, 5, dtype).row_bytes == 15 * size


@given(
    levels=st.integers(1, 4),
    width=st.integers(1, 300_000),
    first=st.integers(0, 5000),
    count=st.integers(0, 5000),
)
def test_chunks_tile_the_rows_in_order_and_are_bounded(levels: int, width: int, first: int, count: int) -> None:
    layout = RowLayout(levels, width, DType.BFLOAT16)
    at = first
    for start, rows in layout.chunks(first, first + count):
        assert start == at
        assert rows >= 1
        assert rows == 1 or rows * layout.row_bytes <= CHUNK_BYTES
        at += rows
    assert at == first + count


@pytest.mark.parametrize("dtype", list(DType))
def test_numbers_that_are_not_finite_are_found_wherever_they_are_and_no_others(dtype: DType) -> None:
    kind = getattr(torch, dtype.value)
    limits = torch.finfo(kind)
    fine = torch.cat([torch.randn(100), torch.tensor([limits.max, limits.min, limits.tiny, -0.0, 0.0])]).to(kind)
    assert all_finite(raw(fine), dtype)
    assert all_finite(raw(-fine.abs()), dtype)
    assert all_finite(b"", dtype)
    for bad in (float("nan"), -float("nan"), float("inf"), -float("inf")):
        for place in (0, 50, 104):
            spoilt = fine.clone()
            spoilt[place] = bad
            assert not all_finite(raw(spoilt), dtype)


def raw(numbers: torch.Tensor) -> bytes:
    return numbers.view(torch.uint8).numpy().tobytes()
