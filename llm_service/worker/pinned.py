"""Shared memory that a GPU copies from by itself: its pages are locked, so that nobody waits for a copy to be made."""

from __future__ import annotations

import contextlib
import weakref
from ctypes import c_size_t, c_uint, c_void_p

import torch
from torch import Tensor

from common import log
from common.cuda_driver import call
from common.device_memory import DeviceMemoryError

_log = log.get("pinned")
_PORTABLE = 1
"""For every context of this process (CU_MEMHOSTREGISTER_PORTABLE)."""


class PinnedCopies:
    """Copies from `memory` (uint8), which stays mapped and locked as long as this object lives. `synchronize` says when
    a copy that was begun no longer reads from it; until then, nobody may write there."""

    def __init__(self, memory: Tensor) -> None:
        try:
            call("cuMemHostRegister_v2", c_void_p(memory.data_ptr()), c_size_t(memory.nbytes), c_uint(_PORTABLE))
        except DeviceMemoryError as error:
            _log.warning("rows are copied to the GPU from ordinary memory: it cannot be locked", cause=str(error))
        else:
            weakref.finalize(self, _unlock, memory)
        self._copied: torch.cuda.Event | None = None

    def record(self) -> None:
        """Copies have been begun on the current stream."""
        self._copied = torch.cuda.Event()
        self._copied.record()

    def synchronize(self) -> None:
        """Waits for the copies that were recorded last."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None


def _unlock(memory: Tensor) -> None:
    with contextlib.suppress(DeviceMemoryError):  # at the end of a process the driver may have ended before
        call("cuMemHostUnregister", c_void_p(memory.data_ptr()))
