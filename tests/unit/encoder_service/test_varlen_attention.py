"""The packed attention kernel against plain torch, interpreted where there is no GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from common.hardware import cuda_device_count
from encoder_service.models.varlen_attention import tile_rows, tiles, varlen_attention

DEVICE = "cuda" if cuda_device_count() else "cpu"
NEAR = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Largest difference to float32 arithmetic over the same rounded inputs, for values around 1."""


def drawn(count: int, heads: int, head: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """q, k and v [count, heads, head], as views of one tensor, as a fused projection gives them."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randn(count, 3, heads, head, generator=generator).clamp(-2, 2)
    return list(packed.to(DEVICE, dtype).unbind(1))


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Segment by segment, in float32."""
    parts = []
    for one, two, three in zip(*(part.float().split(lengths) for part in (q, k, v)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", one, two) / one.shape[-1] ** 0.5
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), three))
    return torch.cat(parts)


def table(lengths: list[int], rows: int, empty: int = 0) -> torch.Tensor:
    return torch.tensor(tiles(lengths, rows) + [(0, 0, 0)] * empty, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head", [64, 72, 80, 128])
def test_every_head_and_type_equals_plain_torch(head: int, dtype: torch.dtype) -> None:
    lengths = [4, 130, 1, 64]
    q, k, v = drawn(sum(lengths), 2, head, dtype)
    rows = tile_rows(max(lengths))
    ours = varlen_attention(q, k, v, table(lengths, rows), rows)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.float(), plain(q, k, v, lengths), rtol=0, atol=NEAR[dtype])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 150), min_size=1, max_size=6), st.sampled_from([64, 128]), st.integers(0, 2**31))
def test_any_segmentation_equals_plain_torch(lengths: list[int], rows: int, seed: int) -> None:
    q, k, v = drawn(sum(lengths), 1, 16, torch.float32, seed)
    ours = varlen_attention(q, k, v, table(lengths, rows, empty=2), rows)
    torch.testing.assert_close(ours, plain(q, k, v, lengths), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
def test_what_is_not_finite_stays_in_its_segment() -> None:
    lengths = [40, 50, 60]
    q, k, v = drawn(150, 2, 16, torch.float32)
    for part, value in ((q, "nan"), (k, "inf"), (v, "nan")):
        part[40:90] = float(value)
    ours = varlen_attention(q, k, v, table(lengths, 128), 128)
    expected = plain(q, k, v, lengths)
    torch.testing.assert_close(ours[:40], expected[:40], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[90:], expected[90:], rtol=1e-5, atol=1e-5)
    assert not ours[40:90].isfinite().any()


def test_large_scores_do_not_overflow() -> None:
    q, k, v = drawn(40, 1, 16, torch.float32)
    ours = varlen_attention(q * 100, k * 100, v, table([40], 64), 64)
    torch.testing.assert_close(ours, plain(q * 100, k * 100, v, [40]), rtol=1e-4, atol=1e-4)


@given(st.lists(st.integers(1, 500), max_size=20), st.sampled_from([64, 128]))
def test_tiles_cover_every_query_once_and_never_leave_a_segment(lengths: list[int], rows: int) -> None:
    covered = [row for first, _, end in tiles(lengths, rows) for row in range(first, min(first + rows, end))]
    assert covered == list(range(sum(lengths)))
    bounds = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
    assert {(start, end) for _, start, end in tiles(lengths, rows)} == set(itertools.pairwise(bounds))


def test_heads_that_are_not_contiguous_are_refused() -> None:
    q = torch.zeros(8, 16, 2, device=DEVICE).transpose(1, 2)
    with pytest.raises(ValueError, match="contiguous"):
        varlen_attention(q, q, q, table([8], 64), 64)
