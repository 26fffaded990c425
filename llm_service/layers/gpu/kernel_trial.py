"""Tries a kernel on a device, once, when a model is loaded: whether it runs and computes correctly."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.telemetry import log

_log = log.get("kernels")

_LEAST = 1e-30
"""Of what is expected, so that a product of nothing but zeros is right as well."""


def gives(what: str, product: Callable[[], Tensor], expected: Tensor, most: float, **told: bool) -> bool:
    """Whether a product runs and differs from `expected` by at most a fraction `most`. If not, that is logged, together
    with the values in `told`. Raises OutOfMemoryError."""
    try:
        error = (product().float() - expected).norm() / expected.norm().clamp(min=_LEAST)
    except torch.OutOfMemoryError:  # it says nothing about a kernel
        raise
    except Exception as refused:  # noqa: BLE001 - whatever a library or a compiler says, another form computes the same
        _log.warning(f"{what} are not there", **told, cause=str(refused).partition("\n")[0])
        return False
    if not (right := bool(error < most)):
        _log.warning(f"{what} are wrong here", **told, error=float(error))
    return right
