"""Resizing in fixed point: bit for bit what torch's own kernel for 8-bit pictures gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_service.worker import fixed_point
from tests import pictures

SIDE = st.one_of(st.integers(4, 40), st.integers(4, 400))
"""Nothing is smaller: `--min-side` is 4, and torch refuses some lines of one pixel."""


def reference(frames: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    return F.interpolate(frames, size, mode="bicubic", align_corners=False, antialias=True)


@settings(max_examples=150, deadline=None)
@given(SIDE, SIDE, SIDE, SIDE, st.integers(0, 2**31))
def test_any_size_to_any_size_is_the_same_to_the_bit(height, width, high, wide, seed):
    generator = torch.Generator().manual_seed(seed)
    frames = torch.randint(0, 256, (1, 3, height, width), dtype=torch.uint8, generator=generator)
    assert torch.equal(fixed_point.resize(frames, (high, wide)), reference(frames, (high, wide)))


@pytest.mark.parametrize("size", [(224, 336), (1001, 640), (1344, 1344), (60, 1999)])
def test_photographs_are_the_same_to_the_bit(size):
    frames = torch.from_numpy(np.array(pictures.photograph())).permute(2, 0, 1)[None].contiguous()
    assert torch.equal(fixed_point.resize(frames, size), reference(frames, size))


def test_hard_edges_neither_wrap_around_nor_ring_otherwise():
    frames = torch.zeros(1, 3, 64, 64, dtype=torch.uint8)
    frames[..., 20:40] = 255
    assert torch.equal(fixed_point.resize(frames, (97, 150)), reference(frames, (97, 150)))


def test_many_frames_go_through_in_parts():
    frames = torch.randint(0, 256, (5, 3, 30, 40), dtype=torch.uint8)
    whole = fixed_point.resize(frames, (20, 24))
    assert torch.equal(fixed_point.resize(frames, (20, 24), chunk=3 * 30 * 24 * 2), whole)
    assert torch.equal(whole, reference(frames, (20, 24)))


def test_a_line_that_keeps_its_length_is_left_alone():
    frames = torch.randint(0, 256, (1, 3, 30, 40), dtype=torch.uint8)
    assert fixed_point.resize(frames, (30, 40)) is frames


def test_weights_of_each_pixel_add_up_to_one():
    for size, out in ((100, 30), (30, 100), (1, 50), (999, 1000)):
        taps = fixed_point.line(size, out)
        total = taps.weight.sum(0) / (1 << taps.precision)
        torch.testing.assert_close(total, torch.ones(out), rtol=0, atol=2e-3)
        assert 0 <= int(taps.index.min()) <= int(taps.index.max()) < size
        assert int(taps.weight.abs().max()) < 1 << 15
