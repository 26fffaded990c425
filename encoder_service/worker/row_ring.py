"""How rows leave a device. From a GPU they go in parts through a ring of locked buffers, on a stream of their own,
while the next batch is computed: a copy to ordinary memory would be waited for. The store's own pages are not locked:
it gives them back to the system (`SharedBuffer.discard`), and a page that is locked then parts from its file."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

_BUFFERS, _BYTES = 4, 4 << 20
"""One part is filled by the GPU while another is emptied by the CPU; the rest is for the unevenness of both."""

Copies = Iterable[tuple[Tensor, Tensor]]
"""Sources, contiguous and on the device, and targets, in pageable memory: both uint8 [n]."""


class Event(Protocol):
    """Something that a device will have done."""

    def synchronize(self) -> None:
        """Waits for it. Raises RuntimeError if the device has failed."""
        ...


class Exit(Protocol):
    """The way out of a device."""

    def mark(self) -> Event:
        """Happens once all is done that was begun on the current stream."""
        ...

    def fetch(self, copies: Copies, after: Event) -> None:
        """Copies from memory that is valid after that event; all copies are complete on return."""
        ...


class Copier(Protocol):
    """A device that copies to the host while it computes, one copy after the other."""

    def buffer(self, size: int) -> Tensor:
        """Host memory, uint8 [size], that the device can write by itself."""
        ...

    def mark(self) -> Event:
        """See `Exit`."""
        ...

    def copy(self, source: Tensor, target: Tensor, after: Event) -> Event:
        """Begins a copy to a part of a `buffer`; the event happens when it is complete."""
        ...


class RowRing:
    """An `Exit` by pinned buffers, for one thread at a time. A buffer is not reused before its content has been copied
    on."""

    def __init__(self, copier: Copier, *, buffers: int = _BUFFERS, size: int = _BYTES) -> None:
        self._copier = copier
        self._size = size
        self._buffers = [copier.buffer(size) for _ in range(buffers)]

    def mark(self) -> Event:
        """See `Exit`."""
        return self._copier.mark()

    def fetch(self, copies: Copies, after: Event) -> None:
        """See `Exit`."""
        free = deque(self._buffers)
        begun: deque[tuple[Event, Tensor, Tensor]] = deque()
        for source, target in _parts(copies, self._size):
            if not free:
                free.append(_land(*begun.popleft()))
            buffer = free.popleft()
            begun.append((self._copier.copy(source, buffer[: len(source)], after), buffer, target))
        for each in begun:
            _land(*each)


class Direct:
    """The `Exit` of a CPU, whose rows are in pageable memory once they were asked for."""

    def mark(self) -> Event:
        """See `Exit`."""
        return _Done()

    def fetch(self, copies: Copies, after: Event) -> None:  # noqa: ARG002 - it has happened
        """See `Exit`."""
        for source, target in copies:
            target.copy_(source)


class CudaCopier:
    """A GPU's `Copier`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def buffer(self, size: int) -> Tensor:
        """See `Copier`."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> Event:
        """See `Copier`. Waiting for it sleeps: processes that decode media can use the core."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, source: Tensor, target: Tensor, after: Event) -> Event:
        """See `Copier`."""
        assert isinstance(after, torch.cuda.Event)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            return self.mark()


class _Done:
    def synchronize(self) -> None:
        pass


def exit_of(device: torch.device) -> Exit:
    """The way out of this device."""
    return RowRing(CudaCopier(device)) if device.type == "cuda" else Direct()


def _parts(copies: Copies, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    for source, target in copies:
        yield from zip(source.split(size), target.split(size), strict=True)


def _land(event: Event, buffer: Tensor, target: Tensor) -> Tensor:
    """Empties a buffer once it is full, and gives it back."""
    event.synchronize()
    target.copy_(buffer[: len(target)])
    return buffer
