"""How our numba kernels are compiled: for this processor, on all threads, and once for all processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import torch

_FREEDOMS = {"reassoc", "contract", "arcp", "afn", "nsz"}
"""What the compiler may do with sums and products; what is not a number stays so."""


def compiled(function: Callable[..., None], *, parallel: bool = True) -> Any:
    """Compiled at its first call, and kept on disk where a folder for that can be written.

    One function is compiled one way: what is kept does not say whether it is `parallel`, and is taken for both.
    """
    options: dict[str, Any] = {"parallel": parallel, "fastmath": _FREEDOMS, "nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(**options, cache=True)(function)
    except RuntimeError:  # no folder to keep it in
        return numba.njit(**options)(function)


def use_threads(count: int) -> None:
    """How many threads the kernels take at most, and torch, in the thread that calls this.

    numba starts its threads here, at the latest. It then tells OpenMP, which is torch's as well, to use one for every
    core from now on; so torch is told last, and nothing tells OpenMP anything after that.
    """
    numba.set_num_threads(min(count, numba.get_num_threads()))
    torch.set_num_threads(count)
