"""Calls to the library of NVIDIA's driver.

Names are those of the CUDA Driver API. A failed driver call leaves no trace, unlike the runtime, which torch uses: that
keeps its last error and blames the next kernel for it.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_char_p, c_int
from typing import Any

from common.gpu.device_memory import DeviceMemoryError


def call(name: str, *arguments: Any) -> None:
    """Calls the driver; raises DeviceMemoryError if the call fails, or there is no driver."""
    try:
        function = getattr(_library(), name)
    except AttributeError as error:
        raise DeviceMemoryError(f"the CUDA driver is too old: it has no {name}") from error
    if code := function(*arguments):
        said = c_char_p()
        _library().cuGetErrorName(c_int(code), byref(said))
        raise DeviceMemoryError(f"{name}: {said.value.decode() if said.value else code}")


@functools.cache
def _library() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceMemoryError("there is no CUDA driver here") from error
