"""Numbers that go to a device together."""

from __future__ import annotations

import torch

from encoder_service.models.moving import in_one_copy, moved

CPU = torch.device("cpu")


def test_each_arrives_as_it_was_at_an_address_that_kernels_take() -> None:
    given = [
        torch.arange(6).view(2, 3).T,
        torch.rand(3, 1),
        torch.empty(0, 2),
        torch.tensor([True, False, True]),
        torch.arange(5, dtype=torch.int32),
        torch.tensor(2.5, dtype=torch.float64),
    ]
    made: list[int] = []

    def room(size: int) -> torch.Tensor:
        made.append(size)
        return torch.full((size,), 255, dtype=torch.uint8)

    there = in_one_copy(given, CPU, room)
    assert len(made) == 1
    for one, other in zip(there, given, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
        assert one.data_ptr() % 16 == 0
    assert len({one.untyped_storage().data_ptr() for one in there}) == 1


def test_on_a_cpu_nothing_is_copied() -> None:
    given = [torch.arange(3)]
    assert moved(given, CPU)[0] is given[0]
