"""Memory of NVIDIA GPUs that other processes read: CUDA IPC, by the driver API (`cuda_driver`).

torch, whose caching allocator packs many tensors into a block, is only asked for the current stream. Every call needs
the device's primary context to be current, as it is in a thread that has used the device by torch.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Sequence
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p

import torch
from torch import Tensor

from common.gpu.cuda_driver import call
from common.gpu.device_memory import DeviceMemoryError

HANDLE_BYTES = 64
_GRANULE = 2 << 20
"""Smaller allocations may share a block with others, which a handle would expose as well."""

_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", c_ubyte * HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", c_ubyte * 16),)


class CudaMemory:
    """The driver; raises DeviceMemoryError if there is none."""

    def __init__(self) -> None:
        call("cuInit", c_uint(0))

    def create(self, device: torch.device, size: int) -> CudaPool:
        """An allocation of whole 2 MiB."""
        size = -(-size // _GRANULE) * _GRANULE
        address, handle = c_uint64(), _Handle()
        with _made_current(device):
            call("cuMemAlloc_v2", byref(address), c_size_t(size))
            try:
                call("cuIpcGetMemHandle", byref(handle), address)
            except DeviceMemoryError:
                call("cuMemFree_v2", address)
                raise
        return CudaPool(device, address.value, bytes(handle.reserved), size)

    def open(self, device: torch.device, handle: bytes) -> CudaMapping:
        """Opens a handle; enables peer access if the memory is on another GPU."""
        if len(handle) != HANDLE_BYTES:
            raise DeviceMemoryError("this is no handle of a CUDA IPC pool")
        address, base, size = c_uint64(), c_uint64(), c_size_t()
        given = _Handle((c_ubyte * HANDLE_BYTES).from_buffer_copy(handle))
        with _made_current(device):
            call("cuIpcOpenMemHandle_v2", byref(address), given, c_uint(_LAZY_PEER_ACCESS))
            mapping = CudaMapping(device, address.value, 0)
            try:
                call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
            except DeviceMemoryError:
                mapping.close()
                raise
        mapping.size = size.value - (address.value - base.value)
        return mapping

    def reachable(self, devices: Sequence[torch.device]) -> list[str]:
        """The GPUs visible to this process that each of `devices` is, or is a peer of."""
        count = c_int()
        call("cuDeviceGetCount", byref(count))
        every = [_ordinal(index) for index in range(count.value)]
        mine = [every[_index(device)] for device in devices]
        return [_uuid(other) for other in every if all(one == other or _peers(one, other) for one in mine)]


class CudaPool:
    """See `device_memory.Pool`."""

    def __init__(self, device: torch.device, address: int, handle: bytes, size: int) -> None:
        self.device = _uuid(_ordinal(_index(device)))
        self.handle = handle
        self.size = size
        self._on = device
        self._address = address

    def write(self, offset: int, source: Tensor) -> None:
        """Device to device, on the current stream."""
        if offset < 0 or offset + source.nbytes > self.size:
            raise DeviceMemoryError("this is outside of the pool")
        _copy(self._on, self._address + offset, source.data_ptr(), source.nbytes)

    def close(self) -> None:
        """Frees the memory."""
        with torch.cuda.device(self._on):
            call("cuMemFree_v2", c_uint64(self._address))


class CudaMapping:
    """See `device_memory.Mapping`. `size` bytes are mapped."""

    def __init__(self, device: torch.device, address: int, size: int) -> None:
        self.size = size
        self._on = device
        self._address = address

    def read(self, offset: int, target: Tensor) -> None:
        """Device to device, or from a peer, on the current stream."""
        if offset < 0 or offset + target.nbytes > self.size:
            raise DeviceMemoryError("this is outside of the pool")
        _copy(self._on, target.data_ptr(), self._address + offset, target.nbytes)

    def close(self) -> None:
        """Unmaps, once everything that was begun on the device has ended."""
        with torch.cuda.device(self._on):
            torch.cuda.synchronize(self._on)
            call("cuIpcCloseMemHandle", c_uint64(self._address))


def _copy(device: torch.device, target: int, source: int, size: int) -> None:
    """The driver finds the GPUs from the addresses."""
    with torch.cuda.device(device):
        stream = c_void_p(torch.cuda.current_stream(device).cuda_stream)
        call("cuMemcpyAsync", c_uint64(target), c_uint64(source), c_size_t(size), stream)


def _made_current(device: torch.device) -> torch.cuda.device:
    """A context in which the device's primary context is current; waiting for the device creates one if necessary."""
    torch.cuda.synchronize(device)
    return torch.cuda.device(device)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device == torch.device("cuda") else device.index


def _ordinal(index: int) -> int:
    """The driver's number of torch's cuda:index; both count within CUDA_VISIBLE_DEVICES."""
    device = c_int()
    call("cuDeviceGet", byref(device), c_int(index))
    return device.value


def _uuid(device: int) -> str:
    """As nvidia-smi writes it."""
    found = _Uuid()
    call("cuDeviceGetUuid_v2", byref(found), c_int(device))
    return f"GPU-{uuid.UUID(bytes=bytes(found.bytes))}"


def _peers(one: int, other: int) -> bool:
    yes = c_int()
    call("cuDeviceCanAccessPeer", byref(yes), c_int(one), c_int(other))
    return bool(yes.value)
