"""`python -m benchmarks.vit`: the vision tower of Qwen3-VL-8B, random weights, on a GPU: eager against graph.

For each mix of pictures and each attention back end: milliseconds of a pass, eagerly and replayed; what the host spends
on it; and the share of the GPU's peak arithmetic. Passes take turns, so that clocks and heat fall on all alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from common.graphs import CudaCapture
from encoder_service.item import Grid
from encoder_service.models.choice import BACKENDS, candidates
from encoder_service.models.qwen3_vl import Qwen3VLTower
from encoder_service.worker.graphs import LADDER, GraphedTower

TOWER: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "out_hidden_size": 4096,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
MIXES = {
    "256 × 256": [Grid(1, 16, 16)],
    "512 × 512": [Grid(1, 32, 32)],
    "1024 × 1024": [Grid(1, 64, 64)],
    "8 of 256 × 256": [Grid(1, 16, 16)] * 8,
    "5 of mixed sizes": [Grid(1, 16, 24), Grid(1, 40, 30), Grid(1, 8, 8), Grid(1, 50, 20), Grid(1, 30, 30)],
    "8 frames of 448 × 448": [Grid(4, 28, 28)],
}


def tower(device: torch.device, dtype: torch.dtype) -> Qwen3VLTower:
    """The tower with weights whose sums stay around 1."""
    with torch.device("meta"):
        made = Qwen3VLTower(TOWER)
    made = made.to_empty(device=device).to(dtype)
    for parameter in made.parameters():
        parameter.requires_grad = False
        if parameter.dim() > 1:
            parameter.normal_(0, parameter.shape[1] ** -0.5)
        else:
            parameter.fill_(0.5)
    return made


def operations(grids: Sequence[Grid]) -> float:
    """Multiplications and additions of one pass."""
    width, inner, out = TOWER["hidden_size"], TOWER["intermediate_size"], TOWER["out_hidden_size"]
    patches = sum(grid.patches for grid in grids)
    layer = 2 * patches * (4 * width * width + 2 * width * inner)
    attention = sum(4 * grid.t * (grid.h * grid.w) ** 2 * width for grid in grids)
    joined = 4 * width
    mergers = (1 + len(TOWER["deepstack_visual_indexes"])) * 2 * (patches // 4) * joined * (joined + out)
    return float(TOWER["depth"]) * (layer + attention) + mergers + 2 * patches * 3 * 2 * 16 * 16 * width


def timed(passes: dict[str, Callable[[], object]], runs: int) -> dict[str, tuple[float, float]]:
    """Medians in seconds, in turns: until the device is done, and until the host is."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in passes}
    for _ in range(runs):
        for name, run in passes.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            run()
            queued = time.perf_counter()
            torch.cuda.synchronize()
            found[name].append((time.perf_counter() - started, queued - started))
    return {name: tuple(map(statistics.median, zip(*each, strict=True))) for name, each in found.items()}


@torch.inference_mode()
def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vit", description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="passes of each kind; the median is shown")
    parser.add_argument("--peak", type=float, default=989.0, help="the GPU's TFLOP/s in bfloat16; an H100's are 989")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU here")
    device, dtype = torch.device("cuda"), torch.bfloat16
    made = tower(device, dtype)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| pictures | patches | attention | eager | graph | ratio | host, eager | host, graph | of peak |")
    print("|---|---:|---|---:|---:|---:|---:|---:|---:|")
    for name in candidates(device, dtype):
        made.backend = made.captured = BACKENDS[name]()
        graphs = None
        if made.backend.stable(LADDER[0], LADDER[0], device) is not None:
            graphs = GraphedTower(made, LADDER, CudaCapture(device), most_bytes=16 << 30, device=device, dtype=dtype)
        for mix, grids in MIXES.items():
            _row(mix, grids, name, made, graphs, given.runs, given.peak)


def _row(
    mix: str, grids: list[Grid], name: str, made: Qwen3VLTower, graphs: GraphedTower | None, runs: int, peak: float
) -> None:
    patches = sum(grid.patches for grid in grids)
    inputs = torch.randn(patches, 3 * 2 * 16 * 16, device="cuda", dtype=torch.bfloat16)
    passes: dict[str, Callable[[], object]] = {"eager": lambda: made(inputs, grids)}
    if graphs is not None:
        passes["graph"] = lambda: graphs(inputs, grids)
    for run in passes.values():
        run()
    found = timed(passes, runs)
    eager, graph = found["eager"], found.get("graph", (float("nan"),) * 2)
    share = operations(grids) / min(eager[0], graph[0] if graphs else eager[0]) / 1e12 / peak
    times = f"{eager[0] * 1e3:.2f} ms | {graph[0] * 1e3:.2f} ms | {graph[0] / eager[0]:.2f}"
    host = f"{eager[1] * 1e3:.2f} ms | {graph[1] * 1e3:.2f} ms"
    print(f"| {mix} | {patches} | {name} | {times} | {host} | {share:.0%} |", flush=True)


if __name__ == "__main__":
    main()
