"""Numbers of a batch on their way to a device: one copy for all that goes together, and none that waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_ALIGNMENT = 16
"""Bytes: kernels are compiled for addresses that are multiples of it, and anew for others."""


def moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of the host, there; to a GPU from locked memory, which torch's own allocator gives to nobody else before
    the copy is over."""
    return list(tensors) if device.type == "cpu" else in_one_copy(tensors, device, _locked)


def in_one_copy(tensors: Sequence[Tensor], device: torch.device, make: Callable[[int], Tensor]) -> list[Tensor]:
    """The same by memory that is made, uint8 of a size."""
    sizes = [each.nbytes for each in tensors]
    begins = [0]
    for size in sizes:
        begins.append(begins[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    host = make(begins[-1])
    for each, begin, size in zip(tensors, begins, sizes, strict=False):
        host[begin : begin + size].view(each.dtype).view(each.shape).copy_(each)
    there = torch.empty(len(host), dtype=torch.uint8, device=device)
    there.copy_(host, non_blocking=True)
    return [
        there[begin : begin + size].view(each.dtype).view(each.shape)
        for each, begin, size in zip(tensors, begins, sizes, strict=False)
    ]


def _locked(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
