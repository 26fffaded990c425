"""Device memory that one process allocates and others on the same host read, as a protocol of few calls. A pool is an
allocation that lives as long as its process; others map it by its handle, and leases govern reading. Rows are announced
with a sum over their bytes (`row_sum`), so that what a dead owner left is never taken for them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from common.hardware import MEMORY_DRIVERS

_WORD = 4
"""Bytes of the words that are summed."""


class DeviceMemoryError(RuntimeError):
    """Device memory cannot be made, or not be read by others; the message says why, for the operator."""


class Pool(Protocol):
    """The owner's side. `device` is the UUID of its device, `handle` is what others open it by."""

    device: str
    handle: bytes
    size: int

    def write(self, offset: int, source: Tensor) -> None:
        """Copies contiguous bytes (uint8, on the same device) to an offset, in the order of the current stream."""
        ...

    def close(self) -> None:
        """Frees it. Nobody may have it open."""
        ...


class Mapping(Protocol):
    """A reader's side: another process's pool, opened."""

    def read(self, offset: int, target: Tensor) -> None:
        """Copies bytes to contiguous memory (uint8) on the reader's device, in the order of the current stream.

        Raises DeviceMemoryError for a range that the pool does not have.
        """
        ...

    def close(self) -> None:
        """Unmaps it."""
        ...


class DeviceMemory(Protocol):
    """The driver of one kind of device."""

    def create(self, device: torch.device, size: int) -> Pool:
        """A pool of at least `size` bytes that other processes can open as long as this one lives: freeing it under
        readers is undefined behaviour. Raises DeviceMemoryError."""
        ...

    def open(self, device: torch.device, handle: bytes) -> Mapping:
        """Maps another process's pool so that `device` can read it; raises DeviceMemoryError."""
        ...

    def reachable(self, devices: Sequence[torch.device]) -> list[str]:
        """UUIDs of the devices whose memory every one of `devices` can read."""
        ...


def driver(device: torch.device) -> DeviceMemory:
    """The driver for a kind of device; raises DeviceMemoryError if there is none."""
    if device.type not in MEMORY_DRIVERS:
        raise DeviceMemoryError(f"a {device.type} has no memory of its own to share: this needs a GPU")
    module, _, name = MEMORY_DRIVERS[device.type].partition(":")
    return cast("DeviceMemory", getattr(importlib.import_module(module), name)())


def row_sum(data: Tensor, row_bytes: int) -> Tensor:
    """A number (int64, on the data's device) that two runs of rows have in common if they are the same.

    `data` is uint8, contiguous, whole rows of `row_bytes`. Rows are summed up as signed 32-bit numbers, modulo 2^32,
    and the sums counted 1, 3, 5 … times, modulo 2^64: so rows of another item, rows in another order, and memory that
    was freed and written by others all tell. No copy of the data is made, wider or not: memory is nearly full here.
    """
    sums = data.view(torch.int32).view(-1, row_bytes // _WORD).sum(1, dtype=torch.int32).to(torch.int64)
    return (sums * torch.arange(1, 2 * len(sums), 2, device=data.device)).sum()


def check_row_bytes(row_bytes: int) -> None:
    """Raises DeviceMemoryError for rows that cannot be summed up."""
    if row_bytes % _WORD:
        raise DeviceMemoryError(f"rows of {row_bytes} bytes cannot be shared: they are no whole 32-bit numbers")


def as_unsigned(number: int) -> int:
    """A 64-bit number as the contract carries it."""
    return number & 0xFFFF_FFFF_FFFF_FFFF
