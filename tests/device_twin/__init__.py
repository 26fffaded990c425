"""The twin of CUDA IPC for machines without a GPU: pools that are memfds, opened through /proc, copied by the CPU.

`environ` switches it on for the services that a test starts, and for all of their child processes: Python imports
`site/sitecustomize.py` in each of them. Nothing of the product knows of it. With TWIN_BLIND in the environment no pool
can be opened.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from common.gpu.device_memory import DeviceMemoryError
from common.shm.arena import ReaderView, SharedBuffer

_HERE = Path(__file__).resolve().parent
_NAME = "TWIN_DEVICE"


def environ(device: str = "TWIN-0") -> dict[str, str]:
    """What turns a service's CPU into a device with memory of its own, by the name of `device`."""
    return {"PYTHONPATH": f"{_HERE / 'site'}{os.pathsep}{_HERE.parent.parent}", _NAME: device}


class Handle(msgspec.Struct, array_like=True):
    """Where the memory is, and what tells it from whatever takes its place."""

    pid: int
    fd: int
    inode: int


class TwinMemory:
    """Every CPU is one device: the one that the environment names."""

    def create(self, device: torch.device, size: int) -> TwinPool:
        return TwinPool(size)

    def open(self, device: torch.device, handle: bytes) -> TwinMapping:
        if "TWIN_BLIND" in os.environ:
            raise DeviceMemoryError("a test wants this to fail")
        return TwinMapping(handle)

    def reachable(self, devices: Sequence[torch.device]) -> list[str]:
        return [os.environ.get(_NAME, "TWIN-0")]


class TwinPool:
    def __init__(self, size: int) -> None:
        self._buffer = SharedBuffer.create("twin-pool", size)
        self.device = os.environ.get(_NAME, "TWIN-0")
        self.size = size
        self.handle = msgspec.msgpack.encode(
            Handle(os.getpid(), self._buffer.fd, os.fstat(self._buffer.fd).st_ino),
        )

    def write(self, offset: int, source: Tensor) -> None:
        if not 0 <= offset <= self.size - source.nbytes:
            raise DeviceMemoryError("this is outside of the pool")
        self._buffer.view[offset : offset + source.nbytes] = source.numpy().data

    def close(self) -> None:
        self._buffer.close()


class TwinMapping:
    def __init__(self, handle: bytes) -> None:
        at = msgspec.msgpack.decode(handle, type=Handle)
        try:
            descriptor = os.open(f"/proc/{at.pid}/fd/{at.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DeviceMemoryError("the owner of the pool is gone") from error
        if os.fstat(descriptor).st_ino != at.inode:
            os.close(descriptor)
            raise DeviceMemoryError("this is another's memory by now")
        self._view = ReaderView(descriptor)

    def read(self, offset: int, target: Tensor) -> None:
        if not 0 <= offset <= self._view.size - target.nbytes:
            raise DeviceMemoryError("this is outside of the pool")
        target.numpy()[:] = np.frombuffer(self._view.view[offset : offset + target.nbytes], np.uint8)

    def close(self) -> None:
        self._view.close()
