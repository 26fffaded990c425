"""`python -m benchmarks.transports`: rows from one process to another by each transport, in one run.

`benchmarks.transport_ends` describes the processes; *memcpy* is numpy's copy between two warm buffers of this one.
*Parts* are gRPC chunks over several connections at once. *NIXL* is measured if it is installed (`--nixl`): over TCP,
as between hosts, unless UCX_TLS says otherwise. Transports take turns. The CPU time of both ends shows the cost on a
busy machine. All transports move the same rows each time: they are *repeated*, like reused memory, and nothing on the
way caches them, so there are no hits to count. `--round-trip-ms` puts a relay between both ends of gRPC, to simulate
distance. With a GPU (`--device`, by default the first one), *CUDA IPC* goes from a pool there to a mirror there, and
*the copy alone* is a rank's share of that, checks included.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.relay import relay
from benchmarks.services import partner
from benchmarks.transport_ends import SIZES
from common.hardware import cuda_device_count

_NAMES = {"plain": "plain gRPC", "shared": "shared memory", "chunks": "gRPC chunks", "parts": "gRPC chunks in parts"}
_AFAR = ("plain", "chunks", "parts")
_NIXL_NAMES = {"nixl": "NIXL"}
_DEVICE_NAMES = {"device": "CUDA IPC", "pull": "the copy alone"}


@dataclass
class Way:
    """One way, the seconds that it took in every round, and the processors' seconds."""

    name: str
    run: Callable[[int], float]
    processes: tuple[int, ...] = ()
    taken: dict[int, list[float]] = field(default_factory=dict)
    computed: dict[int, list[float]] = field(default_factory=dict)

    def once(self, number: int) -> None:
        """Moves the rows of one size."""
        before = self._computed()
        self.taken.setdefault(number, []).append(self.run(number))
        self.computed.setdefault(number, []).append(self._computed() - before)

    def _computed(self) -> float:
        return sum(_processor_seconds(pid) for each in self.processes for pid in (each, *_children(each)))


def _processor_seconds(pid: int) -> float:
    """What a process has computed since it began; the clock's number is the kernel's, see clock_getcpuclockid(3)."""
    return time.clock_gettime((~pid << 3) | 2)


def _children(pid: int) -> list[int]:
    """A NIXL agent's process, for example."""
    return [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]


@contextmanager
def _end(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """One end's process for the length of the block, and the first line that it says."""
    with partner("benchmarks.transport_ends", *arguments) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()


def _asked(process: subprocess.Popen[str]) -> Callable[[int], float]:
    def run(number: int) -> float:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{number}\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    return run


def _memcpy() -> Callable[[int], float]:
    one, other = np.ones(max(SIZES), np.uint8), np.zeros(max(SIZES), np.uint8)

    def run(number: int) -> float:
        started = time.perf_counter()
        np.copyto(other[: SIZES[number]], one[: SIZES[number]])
        return time.perf_counter() - started

    return run


def measure(runs: int, device: str, nixl: str, connections: int, round_trip: float) -> list[Way]:
    """Every way, with `runs` rounds of each size; one more goes first, to warm up. `device` and `nixl`, a back end, are
    empty for none; a round trip takes so many milliseconds longer than the machine does."""
    ways = [Way("memcpy", _memcpy())]
    names = _NAMES | (_NIXL_NAMES if nixl else {}) | (_DEVICE_NAMES if device else {})
    with ExitStack() as stack:
        told = f"--device={device}", f"--nixl={nixl}"
        ports = {end: stack.enter_context(_end(end, *told)) for end in ("send", "send-plain")}
        for kind, name in names.items():
            sender, port = ports["send-plain" if kind == "plain" else "send"]
            if round_trip and kind in _AFAR:
                port = stack.enter_context(relay(int(port), round_trip / 2e3))
            over = connections if kind == "parts" else 1
            reader, _ = stack.enter_context(_end(f"read-{kind}", f"127.0.0.1:{port}", *told, f"--connections={over}"))
            ways.append(Way(name, _asked(reader), (sender.pid, reader.pid)))
        for number in range(len(SIZES)):
            for _ in range(runs + 1):
                for way in ways:
                    way.once(number)
    return ways


def _print(ways: list[Way]) -> None:
    print("| bytes | way | ms | GB/s | × memcpy | × plain gRPC | processors' ms |\n|---:|---|---:|---:|---:|---:|---:|")
    best = {way.name: {number: min(taken[1:]) for number, taken in way.taken.items()} for way in ways}
    for number, size in enumerate(SIZES):
        for way in ways:
            taken = best[way.name][number]
            against = " | ".join(f"{best[other][number] / taken:.2f}" for other in ("memcpy", "plain gRPC"))
            computed = f"{statistics.median(way.computed[number][1:]) * 1e3:.1f}" if way.processes else ""
            speed = f"{taken * 1e3:.2f} | {size / taken / 1e9:.2f}"
            print(f"| {size >> 20} MiB | {way.name} | {speed} | {against} | {computed} |")


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transports", description=__doc__)
    parser.add_argument("--runs", type=int, default=15, help="repetitions; the best is shown")
    first = "cuda:0" if cuda_device_count() else ""
    parser.add_argument("--device", default=first, help="device of the pools; empty: none")
    parser.add_argument("--nixl", default="UCX" if _has_nixl() else "", help="NIXL's back end; empty: none")
    parser.add_argument("--connections", type=int, default=4, help="connections for parts")
    parser.add_argument("--round-trip-ms", type=float, default=0.0, help="added round-trip time")
    given = parser.parse_args()
    os.environ.setdefault("UCX_TLS", "tcp,self")
    _print(measure(given.runs, given.device, given.nixl, given.connections, given.round_trip_ms))


def _has_nixl() -> bool:
    return any(importlib.util.find_spec(name) for name in ("nixl_cu13", "nixl_cu12"))


if __name__ == "__main__":
    main()
