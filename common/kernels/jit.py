"""How our numba kernels are compiled: for this processor, on all threads, and once for all processes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import torch

_FREEDOMS = {"reassoc", "contract", "arcp", "afn", "nsz"}
"""What the compiler may do with sums and products; what is not a number stays so."""


def compiled(function: Callable[..., None], *, parallel: bool = True, made_of: ModuleType | None = None) -> Any:
    """Compiled at its first call, and kept on disk where a folder for that can be written.

    One function is compiled one way: what is kept does not say whether it is `parallel`, and is taken for both. numba
    notices changes of the function's own file, and what is kept bears the sum of the file that else it is `made_of`.
    """
    if made_of is not None and made_of.__file__ is not None:
        function.__qualname__ += f"_{zlib.crc32(Path(made_of.__file__).read_bytes()):08x}"
    options: dict[str, Any] = {"parallel": parallel, "fastmath": _FREEDOMS, "nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(**options, cache=True)(function)
    except RuntimeError:  # no folder to keep it in
        return numba.njit(**options)(function)


def inner(function: Callable[..., Any]) -> Any:
    """A part of a kernel of the same file. What a parallel loop does is better such a part: numba looks through the
    loop's own body many times."""
    return numba.njit(fastmath=_FREEDOMS, nogil=True, error_model="numpy")(function)


def use_threads(count: int) -> None:
    """How many threads the kernels take at most, and torch, in the thread that calls this.

    numba starts its threads here, at the latest. It then tells OpenMP, which is torch's as well, to use one for every
    core from now on; so torch is told last, and nothing tells OpenMP anything after that.
    """
    numba.set_num_threads(min(count, numba.get_num_threads()))
    torch.set_num_threads(count)
