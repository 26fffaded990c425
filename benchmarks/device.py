"""Timing on a device, and what the device could do at best: by its data sheet, and as it copies and multiplies here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Peaks:
    """Operations a second (each multiplication and each addition is one) in dense bfloat16, and bytes a second from and
    to memory."""

    operations: float
    bandwidth: float


SHEETS = {
    "H200": Peaks(989e12, 4.8e12),
    "H100 NVL": Peaks(835e12, 3.9e12),
    "H100 PCIe": Peaks(756e12, 2.0e12),
    "H100": Peaks(989e12, 3.35e12),
    "A100": Peaks(312e12, 2.039e12),
}
"""By a part of the name that the driver gives, from NVIDIA's data sheets of the H200, H100 (SXM where nothing else is
said) and A100 (SXM, 80 GB). Those of the Hopper GPUs state arithmetic with sparsity, which is twice as much."""


def sheet(name: str) -> Peaks | None:
    """What the data sheet of a GPU says; None for one that is not known here."""
    return next((peaks for part, peaks in SHEETS.items() if part in name), None)


def measured(device: torch.device, dtype: torch.dtype, side: int = 8192, size: int = 1 << 30) -> Peaks:
    """What this device does: a product of random square matrices, and a copy of `size` bytes, which counts twice."""
    one, other = torch.randn(2, side, side, device=device, dtype=dtype)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found = timed({"product": lambda: one @ other, "copy": lambda: target.copy_(source)}, 10, device)
    return Peaks(2 * side**3 / found["product"][0], 2 * size / found["copy"][0])


def timed(passes: dict[str, Callable[[], object]], runs: int, device: torch.device) -> dict[str, tuple[float, float]]:
    """Medians in seconds: until the device is done, and until the host is. Passes take turns, so that clocks and heat
    fall on all alike; one round more goes first, to warm up."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in passes}
    for _ in range(runs + 1):
        for name, run in passes.items():
            _wait(device)
            started = time.perf_counter()
            run()
            queued = time.perf_counter()
            _wait(device)
            found[name].append((time.perf_counter() - started, queued - started))
    return {name: _medians(each[1:]) for name, each in found.items()}


def about(device: torch.device) -> str:
    """What was measured on, in a line."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    return f"{name}, torch {torch.__version__}"


def _medians(times: list[tuple[float, float]]) -> tuple[float, float]:
    whole, host = zip(*times, strict=True)
    return statistics.median(whole), statistics.median(host)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
