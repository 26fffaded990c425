"""The hardware of this machine, found without torch, so that control processes stay small and start fast."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.checkpoints.checkpoint import Checkpoint

_CGROUP = Path("/sys/fs/cgroup")
_PROCESSORS = Path("/proc/cpuinfo")
_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA = 158, 0x1023, 18
"""arch_prctl on x86-64 (with AMX); ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA of Linux."""

_CAPABILITY = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and …_MINOR."""
E4M3_CAPABILITY = (8, 9)
"""Of the first GPUs with conversions to and from e4m3 (Ada)."""

MEMORY_DRIVERS = {"cuda": "common.gpu.cuda_ipc:CudaMemory"}
"""By kind of device: the `module:class` that makes its memory readable for other processes (`device_memory`)."""

NOT_LOCKED = "the GPU copies from ordinary memory, since none can be locked: the host waits for that"
"""Used in the log, and beside figures of benchmarks."""


def cuda_device_count() -> int:
    """GPUs that the CUDA driver offers to this process (CUDA_VISIBLE_DEVICES counts); 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def cuda_memory(index: int) -> int:
    """Bytes of a GPU's memory, by its number below `cuda_device_count`; 0 if there is none."""
    if index >= cuda_device_count():
        return 0
    driver = ctypes.CDLL("libcuda.so.1")
    device, size = ctypes.c_int(0), ctypes.c_size_t(0)
    if driver.cuDeviceGet(ctypes.byref(device), index) != 0 or driver.cuDeviceTotalMem_v2(ctypes.byref(size), device):
        return 0
    return size.value


def cuda_capability(index: int) -> tuple[int, int]:
    """Compute capability of a GPU, by the same number; (0, 0) if there is none."""
    if index >= cuda_device_count():
        return 0, 0
    driver, device, parts = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0), (ctypes.c_int(0), ctypes.c_int(0))
    found = driver.cuDeviceGet(ctypes.byref(device), index)
    for part, attribute in zip(parts, _CAPABILITY, strict=True):
        found = found or driver.cuDeviceGetAttribute(ctypes.byref(part), attribute, device)
    return (0, 0) if found else (parts[0].value, parts[1].value)


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Cores that this process can keep busy: those in its affinity mask, limited by its control group, such as a
    container's."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (cgroup / "cpu.max").read_text("ascii").split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or no limit ("max")
        return cores


def memory_limit(cgroup: Path = _CGROUP) -> int | None:
    """The memory limit of this process's control group, such as a container's, in bytes; None if there is none."""
    try:
        return int((cgroup / "memory.max").read_text("ascii"))
    except (OSError, ValueError):  # no such file, or no limit ("max")
        return None


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether this CPU has AVX512-BF16, according to Linux; False if unknown."""
    return "avx512_bf16" in _flags()


@functools.cache
def multiplies_bytes() -> bool:
    """Whether this CPU has AVX512-VNNI, according to Linux; False if unknown."""
    return "avx512_vnni" in _flags()


@functools.cache
def multiplies_byte_tiles() -> bool:
    """Whether tiles (`multiplies_tiles`) may be of 8 bits as well."""
    return "amx_int8" in _flags()


@functools.cache
def multiplies_tiles() -> bool:
    """Whether this CPU has AMX for bfloat16, and Linux permits this process to use it.

    Linux kills a process that uses tiles without permission by SIGILL, since they take 8 KiB of a thread's saved state.
    Permission covers all threads and forked children; an executed program must ask again. Linux refuses if a thread's
    alternate signal stack is too small, and so may a container's rules.
    """
    if not {"amx_tile", "amx_bf16"} <= _flags():
        return False
    refused: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA)
    return refused == 0


def _flags() -> set[str]:
    """The processor's flags in Linux's words; empty if unknown."""
    try:
        lines = _PROCESSORS.read_text("ascii", errors="replace").splitlines()
    except OSError:
        return set()
    return {word for line in lines if line.startswith("flags") for word in line.split()}


def default_device() -> str:
    """cuda:0 if there is a GPU, else cpu."""
    return "cuda:0" if cuda_device_count() else "cpu"


def check_device(device: str, wanted: int = 1, there: int | None = None) -> None:
    """Raises ValueError, in words for operators, if `device` (cpu, cuda or cuda:N) is invalid, or is not here together
    with those after it, `wanted` in all. `there` is the number of GPUs, by default as the driver reports."""
    if device == "cpu":
        return
    kind, colon, index = device.partition(":")
    if kind != "cuda" or (colon and not (index.isascii() and index.isdecimal())):
        raise ValueError(f"--device {device} is not cpu, cuda or cuda:N")
    count = cuda_device_count() if there is None else there
    if not count:
        raise ValueError(f"--device {device}: no GPU can be seen here; --device cpu needs none")
    last = int(index or 0) + wanted - 1
    if last >= count:
        raise ValueError(f"cuda:{last} is needed, and the last GPU that can be seen here is cuda:{count - 1}")


def computed_in(dtype: str, device: str) -> str:
    """The type in which a device computes for a given type: float32 on a CPU that does not multiply in that type."""
    return dtype if device.startswith("cuda") or (dtype == "bfloat16" and multiplies_bfloat16()) else "float32"


def default_dtype(device: str, checkpoint: Checkpoint) -> str:
    """bfloat16 on a GPU, and on a CPU with AVX512-BF16 if the checkpoint is stored in it; else float32."""
    short = device.startswith("cuda") or (multiplies_bfloat16() and checkpoint.stored_in == "BF16")
    return "bfloat16" if short else "float32"
