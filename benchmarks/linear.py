"""`python -m benchmarks.linear`: a linear layer of few rows, torch's own, oneDNN's and those of `common.linear`.

Prints GB/s of weights read, as if all were float32, the best of many passes over more weights than the cache holds; for
the largest number of rows, where arithmetic decides, GFLOP/s.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from common.kernels.jit import use_threads
from common.linear import Linear

_SHAPES = ((6144, 1024), (1024, 3072))
_ROWS = (1, 2, 4, 8, 16, 32, 216)
_BYTES = 200_000_000


def _best(work: Callable[[], object], passes: int, clock: Callable[[], float]) -> float:
    best = float("inf")
    for _ in range(passes):
        started = clock()
        work()
        best = min(best, clock() - started)
    return best


def _plain(x: torch.Tensor, weights: list[torch.Tensor]) -> None:
    for weight in weights:
        functional.linear(x, weight)


def _through(x: torch.Tensor, layers: list[Linear]) -> None:
    for layer in layers:
        layer(x)


def _settled(weight: torch.Tensor, *, few_rows: bool = False, int8: bool = False) -> Linear:
    layer = Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.few_rows = few_rows
    layer.weight.data.copy_(weight)
    layer.settle(int8=int8)
    return layer


@torch.inference_mode()
def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear", description=__doc__)
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of one thread: for a machine that is busy")
    clock = time.perf_counter
    if parser.parse_args().cpu_time:
        clock = time.thread_time
        torch.set_num_threads(1)
        use_threads(1)
    names = ("torch", "oneDNN", "ours", "int8", "ours ÷ torch", "ours ÷ oneDNN", "int8 ÷ torch")
    print("| outputs × inputs | rows | " + " | ".join(names) + " |\n|---|" + "---:|" * (1 + len(names)))
    for outputs, inputs in _SHAPES:
        weights = [torch.randn(outputs, inputs) for _ in range(_BYTES // (outputs * inputs * 4))]
        sides = [
            [_settled(weight) for weight in weights],
            [_settled(weight, few_rows=True) for weight in weights],
            [_settled(weight, int8=True) for weight in weights],
        ]
        for rows in _ROWS:
            x = torch.randn(rows, inputs)
            passes = 10 if rows < 100 else 3
            works = [partial(_plain, x, weights), *(partial(_through, x, layers) for layers in sides)]
            plain, blocked, ours, small = (_best(work, passes, clock) for work in works)
            size = outputs * inputs * len(weights)
            work, unit = (2 * rows * size, "GFLOP/s") if rows == _ROWS[-1] else (4 * size, "GB/s")
            cells = [f"{work / seconds / 1e9:.1f} {unit}" for seconds in (plain, blocked, ours, small)]
            cells += [f"{ratio:.2f}" for ratio in (ours / plain, ours / blocked, small / plain)]
            print(f"| {outputs} × {inputs} | {rows} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
