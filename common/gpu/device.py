"""A process's current GPU: how it is chosen, timed and watched for waits, and how its free memory is given back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from common.checkpoints.checkpoint import CheckpointError

_TRIES = 3
_WAITS = "called a synchronizing CUDA operation"
"""As torch says it."""


def use_gpu(device: torch.device) -> None:
    """Makes a GPU the current one: Triton launches there, wherever the tensors are. Raises CheckpointError where this
    torch cannot."""
    if not torch.cuda.is_available():
        raise CheckpointError(
            f"torch {torch.__version__} cannot use {device}: install a build for this driver, or use --device cpu"
        )
    torch.cuda.set_device(device)


def release_memory() -> None:
    """Waits for this process's GPU, if it has begun to use one, and has torch give back to the driver what it keeps of
    memory that is free."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


Clock = Callable[[Callable[[], object]], float]
"""Seconds that a device spends on what a callable begins, and only begins."""


def gpu_seconds(run: Callable[[], object]) -> float:
    """A `Clock` of the current GPU: the least of a few times, by its own events."""
    times: list[float] = []
    for _ in range(_TRIES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return min(times)


@contextmanager
def told_waits() -> Iterator[list[str]]:
    """Gets, at the end, the line of code of each operator or copy for which the host has waited for the GPU. Waits for
    a stream or an event are none: who waits for these says so."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            found += [f"{each.filename}:{each.lineno}" for each in told if _WAITS in str(each.message)]
