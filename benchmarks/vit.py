"""`python -m benchmarks.vit`: the vision tower of Qwen3-VL-8B, random weights, on a GPU: eager against graph.

For each mix of pictures and each attention back end: milliseconds of a pass, eagerly and replayed; what the host spends
on it; and the share of the arithmetic in the GPU's data sheet, which stands for a peer. Passes take turns. A mix's
random patches are *repeated* in every pass; nothing remembers patches, so there are no hits to count.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks.device import about, measured, sheet, timed
from benchmarks.shapes import TOWER, patch_numbers, tower_operations
from common.gpu import Capture, CudaCapture
from common.media.item import Grid
from encoder_service.models.attention import BACKENDS, candidates
from encoder_service.models.qwen3_vl import Qwen3VLTower
from encoder_service.worker.graphs import LADDER, GraphedTower

MIXES = {
    "256 × 256": [Grid(1, 16, 16)],
    "512 × 512": [Grid(1, 32, 32)],
    "1024 × 1024": [Grid(1, 64, 64)],
    "8 of 256 × 256": [Grid(1, 16, 16)] * 8,
    "5 of mixed sizes": [Grid(1, 16, 24), Grid(1, 40, 30), Grid(1, 8, 8), Grid(1, 50, 20), Grid(1, 30, 30)],
    "8 frames of 448 × 448": [Grid(4, 28, 28)],
}


def tower(shape: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Qwen3VLTower:
    """A tower of this `vision_config`, with weights whose sums stay around 1."""
    with torch.device("meta"):
        made = Qwen3VLTower(shape)
    made = made.to_empty(device=device).to(dtype)
    for parameter in made.parameters():
        parameter.requires_grad = False
        if parameter.dim() > 1:
            parameter.normal_(0, parameter.shape[1] ** -0.5)
        else:
            parameter.fill_(0.5)
    return made


@torch.inference_mode()
def rows(
    shape: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    backends: Sequence[str],
    *,
    runs: int,
    peak: float,
    budgets: Sequence[int] = LADDER,
    capture: Callable[[], Capture] | None = None,
) -> Iterator[str]:
    """The table's rows; `peak` is the device's operations a second, `capture` None: without graphs."""
    made = tower(shape, device, dtype)
    for name in backends:
        made.backend = BACKENDS[name]()
        made.capturable = [made.backend]
        graphs = None
        if capture is not None and made.backend.stable(budgets[0], budgets[0], device) is not None:
            graphs = GraphedTower(made, budgets, capture(), max_bytes=16 << 30, device=device, dtype=dtype)
        for mix, grids in MIXES.items():
            patches = sum(grid.patches for grid in grids)
            inputs = torch.randn(patches, patch_numbers(shape), device=device, dtype=dtype)
            found = timed(_passes(made, graphs, inputs, grids), runs, device)
            eager, graph = found["eager"], found.get("graph", (float("nan"),) * 2)
            share = tower_operations(shape, grids) / min(whole for whole, _ in found.values()) / peak
            times = f"{eager[0] * 1e3:.2f} ms | {graph[0] * 1e3:.2f} ms | {graph[0] / eager[0]:.2f}"
            host = f"{eager[1] * 1e3:.2f} ms | {graph[1] * 1e3:.2f} ms"
            yield f"| {mix} | {patches} | {name} | {times} | {host} | {share:.0%} |"


def _passes(
    made: Qwen3VLTower, graphs: GraphedTower | None, inputs: torch.Tensor, grids: list[Grid]
) -> dict[str, Callable[[], object]]:
    passes: dict[str, Callable[[], object]] = {"eager": lambda: made(inputs, grids)}
    if graphs is not None:
        passes["graph"] = lambda: graphs(inputs, grids)
    return passes


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vit", description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="passes of each kind; the median is shown")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU here")
    device, dtype = torch.device("cuda:0"), torch.bfloat16
    here = measured(device, dtype)
    peaks = sheet(torch.cuda.get_device_name(device)) or here
    print(f"{about(device)}; peak {peaks.operations / 1e12:.0f} TFLOP/s, a product {here.operations / 1e12:.0f}\n")
    print("| pictures | patches | attention | eager | graph | ratio | host, eager | host, graph | of peak |")
    print("|---|---:|---|---:|---:|---:|---:|---:|---:|")
    found = rows(
        TOWER,
        device,
        dtype,
        candidates(device, dtype),
        runs=given.runs,
        peak=peaks.operations,
        capture=lambda: CudaCapture(device),
    )
    for row in found:
        print(row, flush=True)


if __name__ == "__main__":
    main()
