"""`python -m benchmarks.device`: the limits of this device, by its data sheet and by measured copies and products.
Also what device benchmarks share: options, timing, and a file of their rows.

Both are *repeated* over the same numbers; there are no caches, and the data sheet is the peer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from common.gpu.graphs import Capture, CudaCapture
from testkit import triton_interpreter


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


_CEILING_RUNS = 10


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it runs, what that could do at best, and what it does `here`; `capture` None: without graphs. A `tiny` one
    is asked whether everything runs, not how fast. `file` gets a line of JSON for each row."""

    device: torch.device
    dtype: torch.dtype
    peaks: Peaks
    here: Peaks
    runs: int
    capture: Callable[[], Capture] | None = None
    tiny: bool = False
    file: Path | None = None

    def keep(self, **row: object) -> None:
        """Adds a row to the file, at once: whatever ends the run later, it is there."""
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as out:
                out.write(json.dumps({**row, **({"tiny": True} if self.tiny else {})}) + "\n")


class Again:
    """On a CPU a graph is its callable, and takes no memory."""

    held = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run


def add_options(parser: argparse.ArgumentParser, runs: int | None) -> None:
    """Those that every benchmark of a device has; `runs` by default, None: it takes no medians."""
    if runs is not None:
        parser.add_argument("--runs", type=int, default=runs, help="runs of each kind; the median is shown")
    else:
        parser.set_defaults(runs=_CEILING_RUNS)
    parser.add_argument("--json", type=Path, help="a file for rows as lines of JSON, written one by one")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a test run: small shapes, whatever the other options say; no figures; on CPUs as well",
    )


def machine(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Machine:
    """The first GPU, or with `--tiny` the CPU where there is none; says so. Ends the program where it cannot be."""
    gpu, tiny = torch.cuda.is_available(), given.tiny
    if not gpu and not tiny:
        parser.error("torch sees no GPU here")
    if not gpu and triton_interpreter.is_too_old():
        triton_interpreter.mend()
    device, dtype = (torch.device("cuda:0"), torch.bfloat16) if gpu else (torch.device("cpu"), torch.float32)
    here = measured(device, dtype, 64, 1 << 16, runs=1) if tiny else measured(device, dtype, runs=given.runs)
    peaks = (sheet(torch.cuda.get_device_name(device)) if gpu else None) or here
    capture = (lambda: CudaCapture(device)) if gpu else Again
    print(f"{about(device)}{'; TINY SHAPES: these figures mean nothing' if tiny else ''}")
    for name, each in (("data sheet", peaks), ("a copy and a product here", here)):
        print(f"{name}: {each.bandwidth / 1e12:.2f} TB/s, {each.operations / 1e12:.0f} TFLOP/s")
    made = Machine(device, dtype, peaks, here, 1 if tiny else given.runs, capture, tiny, given.json)
    made.keep(table="device", name=about(device), bandwidth=here.bandwidth, operations=here.operations)
    return made


def head(cells: Sequence[object]) -> str:
    """The first two lines of a table."""
    return f"{line(cells)}\n{'|---:' * len(cells)}|"


def line(cells: Sequence[object]) -> str:
    """One of the others."""
    return f"| {' | '.join(map(str, cells))} |"


def ms(seconds: float) -> str:
    """As tables have it."""
    return f"{1e3 * seconds:.3f} ms"


_HEALTHY = 0.6


def sheet(name: str) -> Peaks | None:
    """What the data sheet of a GPU says; None for one that is not known here."""
    return next((peaks for part, peaks in SHEETS.items() if part in name), None)


def measured(
    device: torch.device, dtype: torch.dtype, side: int = 8192, size: int = 1 << 30, runs: int = _CEILING_RUNS
) -> Peaks:
    """What this device does: a product of random square matrices, and a copy of `size` bytes, which counts twice."""
    one, other = torch.randn(2, side, side, device=device, dtype=dtype)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found = timed({"product": lambda: one @ other, "copy": lambda: target.copy_(source)}, runs, device)
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


def main() -> None:
    """Measures and prints; the exit code is 1 where a GPU falls far behind its data sheet: then no figure counts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=__doc__)
    add_options(parser, 10)
    found = machine(parser, parser.parse_args())
    here, peaks = found.here, found.peaks
    slow = here.bandwidth < _HEALTHY * peaks.bandwidth or here.operations < _HEALTHY * peaks.operations
    sys.exit("this device falls far behind its data sheet: is it shared, or throttled?" if slow else None)


if __name__ == "__main__":
    main()
