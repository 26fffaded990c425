"""The landed rows as a worker sees them, and copies of them to a GPU."""

from __future__ import annotations

import contextlib
import weakref
from ctypes import c_size_t, c_uint, c_void_p

import torch
from torch import Tensor

from common.gpu.cuda_driver import call
from common.gpu.device_memory import DeviceMemoryError
from common.hardware import NOT_LOCKED
from common.telemetry import log
from llm_service.plan import RowSlice
from llm_service.worker.mirror import Mirror

_log = log.get("pinned")
_PORTABLE = 1
"""For every context of this process (CU_MEMHOSTREGISTER_PORTABLE)."""


class PinnedCopies:
    """Lets a GPU copy from `memory` (uint8) by itself; it stays mapped and locked as long as this object lives."""

    def __init__(self, memory: Tensor) -> None:
        try:
            call("cuMemHostRegister_v2", c_void_p(memory.data_ptr()), c_size_t(memory.nbytes), c_uint(_PORTABLE))
        except DeviceMemoryError as error:
            _log.warning(NOT_LOCKED, cause=str(error))
        else:
            weakref.finalize(self, _unlock, memory)


def _unlock(memory: Tensor) -> None:
    with contextlib.suppress(DeviceMemoryError):  # at the end of a process the driver may have ended before
        call("cuMemHostUnregister", c_void_p(memory.data_ptr()))


class RowArena:
    """The rows as workers see them: `levels` · `width` elements of `dtype` each, in shared memory, except those that
    `mirror` has on the device."""

    def __init__(
        self, memory: memoryview, levels: int, width: int, dtype: torch.dtype, mirror: Mirror | None = None
    ) -> None:
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.levels = levels
        self.width = width
        self.dtype = dtype
        self.mirror = mirror
        self._pinned: PinnedCopies | None = None

    def pin(self) -> None:
        """Lets a GPU read rows by DMA: nobody may write rows that a step reads before that step is over."""
        self._pinned = PinnedCopies(self._bytes)

    @property
    def the_mirror(self) -> Mirror:
        """The mirror, which must exist."""
        assert self.mirror is not None, "an order for a mirror that there is not"
        return self.mirror

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.levels * self.width * self.dtype.itemsize

    def bytes_of(self, rows: RowSlice) -> Tensor:
        """A view uint8 [count · row_bytes] of a run of rows."""
        return self._bytes[rows.offset : rows.offset + rows.count * self.row_bytes]

    def read(self, rows: RowSlice) -> list[Tensor]:
        """Views [n, levels, width] of a run of rows, in order, wherever they are."""
        if self.mirror is None:
            return [self._shaped(self.bytes_of(rows))]
        return [
            self._shaped(self.mirror.bytes_of(begin, end) if here else self._bytes[begin:end])
            for begin, end, here in self.mirror.split(rows.offset, rows.count * self.row_bytes)
        ]

    def _shaped(self, data: Tensor) -> Tensor:
        return data.view(self.dtype).view(-1, self.levels, self.width)
