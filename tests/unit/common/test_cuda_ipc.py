"""The driver's calls as they arrive at a library: a stand-in for libcuda, in C, that keeps its memory on the host.

It cannot show that a GPU does what is asked of it (`tests/gpu` does that), but that each call has the name and the
arguments of the CUDA Driver API: structures by value, addresses of 64 bits, the flag for peers, the stream.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.gpu import cuda_driver, cuda_ipc
from common.gpu.cuda_ipc import HANDLE_BYTES, CudaMemory
from common.gpu.device_memory import DeviceMemoryError

GPU = [torch.device("cuda:0"), torch.device("cuda:1")]
STREAM = 0x77

LIBRARY = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef struct { unsigned char reserved[64]; } Handle;
typedef struct { unsigned char bytes[16]; } Uuid;
int opened, closed, freed, flags_given; void *stream_given;
int cuInit(unsigned flags) { return flags ? 1 : 0; }
int cuDeviceGetCount(int *count) { *count = 3; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 10 + ordinal; return ordinal < 3 ? 0 : 101; }
int cuDeviceGetUuid_v2(Uuid *uuid, int device) { memset(uuid->bytes, device, 16); return 0; }
/* 10 and 11 are peers of each other; 12 of nobody. */
int cuDeviceCanAccessPeer(int *yes, int one, int other) { *yes = one + other == 21; return 0; }
int cuMemAlloc_v2(uint64_t *address, size_t size) {
  if (size > (1ull << 40)) return 2;
  *address = (uint64_t)(uintptr_t)calloc(1, size);
  memcpy((void *)(uintptr_t)*address, &size, sizeof size);
  return 0;
}
int cuMemFree_v2(uint64_t address) { freed++; free((void *)(uintptr_t)address); return 0; }
int cuIpcGetMemHandle(Handle *handle, uint64_t address) {
  memset(handle->reserved, 0xAB, 64);
  memcpy(handle->reserved + 56, &address, 8);
  return 0;
}
int cuIpcOpenMemHandle_v2(uint64_t *address, Handle handle, unsigned flags) {
  flags_given = flags;
  if (handle.reserved[0] != 0xAB || handle.reserved[55] != 0xAB) return 400;
  memcpy(address, handle.reserved + 56, 8);
  opened++;
  return 0;
}
int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t address) {
  *base = address;
  *size = 4u << 20;
  return 0;
}
int cuIpcCloseMemHandle(uint64_t address) { closed++; return address ? 0 : 1; }
int cuMemcpyAsync(uint64_t target, uint64_t source, size_t size, void *stream) {
  stream_given = stream;
  memcpy((void *)(uintptr_t)target, (void *)(uintptr_t)source, size);
  return 0;
}
int cuGetErrorName(int code, const char **name) {
  *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 400 ? "CUDA_ERROR_INVALID_HANDLE" : 0;
  return 0;
}
"""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Any:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder: Path = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(LIBRARY)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", folder / "driver.so", folder / "driver.c"], check=True, timeout=180
    )
    return ctypes.CDLL(str(folder / "driver.so"))


@pytest.fixture
def library(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(cuda_driver, "_library", lambda: stand_in)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=STREAM))
    for counter in ("opened", "closed", "freed"):
        ctypes.c_int.in_dll(stand_in, counter).value = 0
    yield stand_in
    assert count(stand_in, "opened") == count(stand_in, "closed")


def count(library: Any, name: str) -> int:
    return ctypes.c_int.in_dll(library, name).value


def test_what_is_written_to_a_pool_is_read_through_its_handle(library: Any) -> None:
    memory, rows = CudaMemory(), torch.arange(200, dtype=torch.uint8)
    pool = memory.create(GPU[1], 3 << 20)
    assert (pool.size, len(pool.handle)) == (4 << 20, HANDLE_BYTES), "whole granules of 2 MiB"
    assert pool.device == "GPU-0b0b0b0b-0b0b-0b0b-0b0b-0b0b0b0b0b0b"
    pool.write(1000, rows)
    assert ctypes.c_void_p.in_dll(library, "stream_given").value == STREAM
    mapping, target = memory.open(GPU[0], pool.handle), torch.zeros(200, dtype=torch.uint8)
    assert count(library, "flags_given") == 1, "access to peers is turned on where it is needed"
    mapping.read(1000, target)
    assert torch.equal(target, rows)
    for offset in (-1, (4 << 20) - 199):
        with pytest.raises(DeviceMemoryError):
            mapping.read(offset, target)
        with pytest.raises(DeviceMemoryError):
            pool.write(offset, rows)
    mapping.close()
    pool.close()
    assert (count(library, "closed"), count(library, "freed")) == (1, 1)


def test_the_driver_s_refusals_have_its_names(library: Any) -> None:
    with pytest.raises(DeviceMemoryError, match="cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY"):
        CudaMemory().create(GPU[0], 1 << 50)
    with pytest.raises(DeviceMemoryError, match="cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_HANDLE"):
        CudaMemory().open(GPU[0], bytes(HANDLE_BYTES))
    with pytest.raises(DeviceMemoryError, match="no handle"):
        CudaMemory().open(GPU[0], b"short")


def test_devices_are_reachable_that_every_rank_is_or_is_a_peer_of(library: Any) -> None:
    first, second, third = (f"GPU-{f'{n:02x}' * 4}-{f'{n:02x}' * 2}-{f'{n:02x}' * 2}-{f'{n:02x}' * 2}-{f'{n:02x}' * 6}"
                            for n in (10, 11, 12))  # fmt: skip
    assert CudaMemory().reachable([GPU[0]]) == [first, second]
    assert CudaMemory().reachable(GPU) == [first, second]
    assert CudaMemory().reachable([torch.device("cuda:2")]) == [third]
    assert CudaMemory().reachable([*GPU, torch.device("cuda:2")]) == []


def test_a_pool_whose_memory_cannot_be_shared_is_freed(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    call = cuda_driver.call

    def refuses(name: str, *arguments: Any) -> None:
        if name == "cuIpcGetMemHandle":
            raise DeviceMemoryError("cuIpcGetMemHandle: CUDA_ERROR_NOT_SUPPORTED")
        call(name, *arguments)

    monkeypatch.setattr(cuda_ipc, "call", refuses)
    with pytest.raises(DeviceMemoryError, match="NOT_SUPPORTED"):
        CudaMemory().create(GPU[0], 1)
    assert count(library, "freed") == 1
