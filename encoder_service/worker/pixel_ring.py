"""Brings pixels to a device: to a GPU in parts through a ring of pinned buffers, since a copy from pageable memory
blocks. For why the staging arena itself is not pinned see `row_ring`."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch
from torch import Tensor

from encoder_service.worker.row_ring import Event

_BUFFERS, _BYTES = 4, 4 << 20
"""One part is filled by the CPU while the GPU reads another; the rest is for the unevenness of both."""


class WayIn(Protocol):
    """The way into a device."""

    def bring(self, source: Tensor) -> Tensor:
        """The same on the device, for work that begins on the current stream from now on. `source` is contiguous, in
        pageable memory, and need not be kept."""
        ...


class Loader(Protocol):
    """A device that copies from the host while it computes, one copy after the other."""

    def buffer(self, size: int) -> Tensor:
        """Host memory, uint8 [size], that the device can read by itself."""
        ...

    def room(self, size: int) -> Tensor:
        """Device memory, uint8 [size]."""
        ...

    def copy(self, source: Tensor, target: Tensor) -> Event:
        """Begins a copy from a part of a `buffer`; the event says that it has been read."""
        ...


class PixelRing:
    """A `WayIn` by pinned buffers, for one thread at a time. A buffer is not refilled before the device has read it,
    whichever item it was for."""

    def __init__(self, loader: Loader, *, buffers: int = _BUFFERS, size: int = _BYTES) -> None:
        self._loader = loader
        self._size = size
        self._ring: deque[tuple[Tensor, Event | None]] = deque((loader.buffer(size), None) for _ in range(buffers))

    def bring(self, source: Tensor) -> Tensor:
        """See `WayIn`."""
        flat = source.view(-1).view(torch.uint8)
        there = self._loader.room(len(flat))
        for part, target in zip(flat.split(self._size), there.split(self._size), strict=True):
            buffer, read = self._ring[0]
            if read is not None:
                read.synchronize()
            buffer[: len(part)].copy_(part)
            self._ring[0] = buffer, self._loader.copy(buffer[: len(part)], target)
            self._ring.rotate(-1)
        return there.view(source.dtype).view(source.shape)


class InPlace:
    """The `WayIn` of a CPU, which reads pixels in place."""

    def bring(self, source: Tensor) -> Tensor:
        """See `WayIn`."""
        return source


class CudaLoader:
    """A GPU's `Loader`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def buffer(self, size: int) -> Tensor:
        """See `Loader`."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def room(self, size: int) -> Tensor:
        """See `Loader`."""
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def copy(self, source: Tensor, target: Tensor) -> Event:
        """See `Loader`. Waiting for the event sleeps, as in `row_ring`."""
        target.copy_(source, non_blocking=True)
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def way_into(device: torch.device) -> WayIn:
    """The way into this device."""
    return PixelRing(CudaLoader(device)) if device.type == "cuda" else InPlace()


def kept_there(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor on a device, to be kept; nobody waits for the copy."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)  # torch's allocator keeps the memory until it was read
