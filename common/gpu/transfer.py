"""Numbers on their way between host and device: one copy for all that goes together, and none that waits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes: kernels are compiled for addresses that are multiples of it, and again for others."""

_TYPES = {
    np.dtype(given): kept
    for given, kept in (
        (np.uint8, torch.uint8),
        (np.int32, torch.int32),
        (np.int64, torch.int64),
        (np.float32, torch.float32),
        (np.float64, torch.float64),
    )
}
"""The types of arrays on the device."""


def aligned(size: int, to: int = ALIGNMENT) -> int:
    """The next multiple.

    >>> aligned(0), aligned(17), aligned(5, 4)
    (0, 32, 8)
    """
    return -(-size // to) * to


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Each array as a tensor of the same shape and type on the device: all in one asynchronous copy.

    It reads pinned memory, which torch's allocator does not reuse before the copy is over.
    """
    ends: list[int] = []
    for array in arrays:
        begin = aligned(ends[-1] if ends else 0)
        ends.append(begin + array.nbytes)
    there = _moved(arrays, ends, device)
    return [
        there[end - array.nbytes : end].view(_TYPES[array.dtype]).view(array.shape)
        for array, end in zip(arrays, ends, strict=True)
    ]


def tensors_to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The same for host tensors of any type; on a CPU they are returned unchanged."""
    if device.type == "cpu":
        return list(tensors)
    there = to_device([_bytes_of(each) for each in tensors], device)
    return [moved.view(each.dtype).view(each.shape) for moved, each in zip(there, tensors, strict=True)]


def _bytes_of(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def _moved(arrays: Sequence[np.ndarray], ends: Sequence[int], device: torch.device) -> Tensor:
    """uint8 [last of ends] on the device; each array ends at its place."""
    host = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    packed = host.numpy()
    for array, end in zip(arrays, ends, strict=True):
        packed[end - array.nbytes : end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = torch.empty(len(host), dtype=torch.uint8, device=device)
    there.copy_(host, non_blocking=True)
    return there


class ToHost:
    """A tensor's copy to the host, begun when this is made; `read` waits for it and for nothing that is begun later."""

    def __init__(self, source: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._copy = source
        if source.device.type == "cuda":
            self._copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._copy.copy_(source, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> Tensor:
        """The copy, on the host."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copy
