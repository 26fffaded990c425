"""Shared memory that a GPU copies from by itself: its pages are locked, so that nobody waits for a copy to be made."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from common import log

_log = log.get("pinned")
_PORTABLE = 1
"""For every context of this process (cudaHostRegisterPortable)."""


class PinnedCopies:
    """Copies from `memory` (uint8), which stays locked as long as this object lives. `done` says when a copy that was
    begun no longer reads from it; until then, nobody may write there."""

    def __init__(self, memory: Tensor) -> None:
        runtime: Any = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))
        self.locked = code == 0
        if self.locked:
            weakref.finalize(self, runtime.cudaHostUnregister, memory.data_ptr())
        else:
            _log.warning("rows are copied to the GPU from ordinary memory: it cannot be locked", code=code)
        self._copied: torch.cuda.Event | None = None

    def mark(self) -> None:
        """Copies have been begun on the current stream."""
        self._copied = torch.cuda.Event()
        self._copied.record()

    def done(self) -> None:
        """Waits for the copies that were marked last."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
