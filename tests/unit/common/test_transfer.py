"""Numbers that go to a device together."""

from __future__ import annotations

import pytest
import torch

from common.gpu import transfer

CPU, META = torch.device("cpu"), torch.device("meta")


def test_each_arrives_as_it_was_at_an_address_that_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is none: what would be copied to it stays on the host."""
    given = [
        torch.arange(6).view(2, 3).T,
        torch.rand(3, 1).bfloat16(),
        torch.empty(0, 2),
        torch.tensor([True, False, True]),
        torch.arange(5, dtype=torch.int32),
        torch.tensor(2.5, dtype=torch.float64),
    ]
    plain, copies = transfer._moved, list[int]()

    def moved(arrays: list[object], ends: list[int], _: torch.device) -> torch.Tensor:
        copies.append(ends[-1])
        return plain(arrays, ends, CPU)  # type: ignore[arg-type]

    monkeypatch.setattr(transfer, "_moved", moved)
    there = transfer.tensors_to_device(given, META)
    assert len(copies) == 1
    for one, other in zip(there, given, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
        assert one.data_ptr() % 16 == 0
    assert len({one.untyped_storage().data_ptr() for one in there}) == 1


def test_on_a_cpu_nothing_is_copied() -> None:
    given = [torch.arange(3)]
    assert transfer.tensors_to_device(given, CPU)[0] is given[0]
