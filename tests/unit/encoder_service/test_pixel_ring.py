"""Pixels enter through a ring of buffers: whole, and no buffer is filled again before it was read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from encoder_service.worker.pixel_ring import InPlace, PixelRing, way_into
from tests.lazy_copier import LazyEvent, LazyLoader


def noise(size: int, seed: int) -> Tensor:
    return torch.randint(0, 255, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@given(st.lists(st.integers(0, 40), max_size=5), st.integers(1, 3), st.integers(1, 16))
def test_everything_is_there_once_the_device_gets_to_it(sizes: list[int], buffers: int, size: int) -> None:
    loader = LazyLoader()
    ring = PixelRing(loader, buffers=buffers, size=size)
    sources = [noise(each, seed) for seed, each in enumerate(sizes)]
    there = [ring.bring(each) for each in sources for _ in range(2)]
    loader.finish()
    assert all(torch.equal(*each) for each in zip(there, (each for each in sources for _ in range(2)), strict=True))
    assert len(loader.buffers) == buffers


def test_a_picture_keeps_its_shape_and_its_source_may_change_at_once() -> None:
    loader = LazyLoader()
    source = noise(60, 0).view(1, 4, 5, 3)
    expected, there = source.clone(), PixelRing(loader, buffers=9, size=8).bring(source)
    source.fill_(0)
    loader.finish()
    assert torch.equal(there, expected)


def test_nobody_waits_before_all_buffers_are_in_use_whichever_pictures_are_in_them() -> None:
    loader = LazyLoader()
    ring = PixelRing(loader, buffers=4, size=4)
    for seed in range(2):
        ring.bring(noise(8, seed))
    assert loader.waits == 0
    ring.bring(noise(4, 2))
    assert loader.waits == 1


def test_a_device_that_fails_is_told_by_who_waits() -> None:
    class Failing(LazyLoader):
        def copy(self, source: Tensor, target: Tensor) -> LazyEvent:
            def fail() -> None:
                raise RuntimeError("an illegal memory access was encountered")

            return LazyEvent(fail)

    with pytest.raises(RuntimeError, match="illegal"):
        PixelRing(Failing(), buffers=1, size=4).bring(noise(8, 0))


def test_a_cpu_reads_pixels_where_they_lie() -> None:
    way_in, source = way_into(torch.device("cpu")), noise(9, 0)
    assert isinstance(way_in, InPlace)
    assert way_in.bring(source) is source
