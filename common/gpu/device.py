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
    """Makes a GPU current, since Triton launches there wherever the tensors are, with its context, which calls to the
    driver need: torch makes it at the first work for the GPU. Raises CheckpointError if this torch cannot use it."""
    if not torch.cuda.is_available():
        raise CheckpointError(
            f"torch {torch.__version__} cannot use {device}: install a build for this driver, or use --device cpu"
        )
    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)


def release_memory() -> None:
    """Waits for this process's GPU, if it uses one, and has torch return cached memory to the driver."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


Clock = Callable[[Callable[[], object]], float]
"""Seconds that a device takes for what a callable launches."""


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
    """At the end, holds the line of code of each operator or copy for which the host waited for the GPU. Explicit waits
    for streams and events do not count."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            found += [f"{each.filename}:{each.lineno}" for each in told if _WAITS in str(each.message)]
