"""Rows leave through a ring of buffers: whole, in order, and no buffer is used again too early."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from encoder_service.worker.row_ring import Direct, RowRing, exit_of
from tests.lazy_copier import LazyCopier


def noise(size: int, seed: int) -> Tensor:
    return torch.randint(0, 255, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@given(st.lists(st.integers(0, 40), max_size=5), st.integers(1, 3), st.integers(1, 16))
def test_everything_arrives_whatever_the_sizes(sizes: list[int], buffers: int, size: int) -> None:
    copier = LazyCopier()
    ring = RowRing(copier, buffers=buffers, size=size)
    sources = [noise(each, seed) for seed, each in enumerate(sizes)]
    for _ in range(2):
        targets = [torch.zeros(each, dtype=torch.uint8) for each in sizes]
        ring.fetch(zip(sources, targets, strict=True), ring.mark())
        assert all(torch.equal(*each) for each in zip(sources, targets, strict=True))
    assert len(copier.buffers) == buffers


def test_nothing_is_copied_before_it_was_computed_and_the_next_is_not_waited_for() -> None:
    copier, source, target = LazyCopier(), torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    ring = RowRing(copier, buffers=2, size=4)
    copier.compute("first", lambda: source.fill_(7))
    computed = ring.mark()
    copier.compute("second", lambda: None)
    ring.fetch([(source, target)], computed)
    assert copier.log == ["mark", "first", "copied 4", "copied 4"]
    assert target.tolist() == [7] * 8


def test_one_part_is_on_its_way_while_another_is_put_away() -> None:
    copier = LazyCopier()
    ring = RowRing(copier, buffers=2, size=4)
    source, target = noise(16, 0), torch.zeros(16, dtype=torch.uint8)
    begun: list[int] = []
    plain = copier.copy

    def watched(source: Tensor, target: Tensor, after: object) -> object:
        begun.append(sum(line.startswith("copied") for line in copier.log))
        return plain(source, target, after)

    copier.copy = watched
    ring.fetch([(source, target)], ring.mark())
    assert begun == [0, 0, 1, 2], "each copy is begun as soon as a buffer is free"
    assert torch.equal(source, target)


def test_a_device_that_fails_is_told_by_who_waits() -> None:
    copier = LazyCopier()
    ring = RowRing(copier, buffers=1, size=4)

    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    copier.compute("fails", fail)
    with pytest.raises(RuntimeError, match="illegal"):
        ring.fetch([(noise(4, 0), torch.zeros(4, dtype=torch.uint8))], ring.mark())


def test_a_cpu_needs_no_buffers() -> None:
    way_out = exit_of(torch.device("cpu"))
    assert isinstance(way_out, Direct)
    source, target = noise(9, 0), torch.zeros(9, dtype=torch.uint8)
    way_out.fetch([(source, target)], way_out.mark())
    assert torch.equal(source, target)
