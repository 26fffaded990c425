"""A device that does nothing before somebody waits for it: what is read too early is noise, and so is what was written
over too early."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_NOISE = 0xAA


class LazyEvent:
    """Something that is done when it is waited for, after what it comes after."""

    def __init__(self, work: Callable[[], None] | None = None, *after: LazyEvent) -> None:
        self._work = work
        self._after = after
        self.happened = False

    def synchronize(self) -> None:
        if not self.happened:
            for each in self._after:
                each.synchronize()
            if self._work is not None:
                self._work()
            self.happened = True


class LazyCopier:
    """See `worker.row_ring.Copier`. Copies are done in order, the latest possible. `log` has what happened; `compute`
    is work of the current stream."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.buffers: list[Tensor] = []
        self._computed = LazyEvent()
        self._copied = LazyEvent()
        self._taken: dict[int, LazyEvent] = {}

    def buffer(self, size: int) -> Tensor:
        self.buffers.append(torch.full((size,), _NOISE, dtype=torch.uint8))
        return self.buffers[-1]

    def compute(self, name: str, work: Callable[[], object]) -> None:
        """Something that the device will have done before the next mark."""

        def run() -> None:
            self.log.append(name)
            work()

        self._computed = LazyEvent(run, self._computed)

    def mark(self) -> LazyEvent:
        self.log.append("mark")
        return LazyEvent(None, self._computed)

    def copy(self, source: Tensor, target: Tensor, after: LazyEvent) -> LazyEvent:
        place = target.data_ptr()
        before = self._taken.get(place) if len(target) else None  # nothing lies nowhere, whatever the buffer
        assert before is None or before.happened, "a buffer is used again before what it holds was waited for"
        target.fill_(_NOISE)

        def run() -> None:
            self.log.append(f"copied {len(source)}")
            target.copy_(source)

        self._copied = self._taken[place] = LazyEvent(run, after, self._copied)
        return self._copied


class LazyLoader:
    """See `worker.pixel_ring.Loader`. Copies are done in order, the latest possible: `finish` has all of them done."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.waits = 0
        self._copied = LazyEvent()

    def buffer(self, size: int) -> Tensor:
        self.buffers.append(torch.full((size,), _NOISE, dtype=torch.uint8))
        return self.buffers[-1]

    def room(self, size: int) -> Tensor:
        return torch.full((size,), _NOISE, dtype=torch.uint8)

    def copy(self, source: Tensor, target: Tensor) -> LazyEvent:
        def run() -> None:
            target.copy_(source)

        self._copied = LazyEvent(run, self._copied)
        return _Counted(self, self._copied)

    def finish(self) -> None:
        """What the device has begun is done."""
        self._copied.synchronize()


class _Counted(LazyEvent):
    """An event whose waits are counted, where it has not happened yet."""

    def __init__(self, loader: LazyLoader, event: LazyEvent) -> None:
        super().__init__(None, event)
        self._loader, self._event = loader, event

    def synchronize(self) -> None:
        self._loader.waits += not self._event.happened
        super().synchronize()
