"""`python -m benchmarks.tower`: CPU seconds of one pass of the vision tower on one thread, compared with transformers.

CPU time holds on a busy machine. Passes take turns; the shortest of each is shown. Each round has new random patches,
the same for all; nothing caches patches, so there are no hits to count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.checkpoint import add_model_options, chosen_model
from common.checkpoints.checkpoint import Checkpoint
from common.media.item import Grid
from encoder_service.families import config
from encoder_service.models.tower import load_tower
from testkit import reference


@torch.inference_mode()
def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tower", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--sides", type=int, nargs="+", default=(256, 448, 896), help="sides in pixels")
    parser.add_argument("--runs", type=int, default=5, help="passes of each kind; the shortest time is shown")
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder = chosen_model(given)
    checkpoint, cpu = Checkpoint(folder), torch.device("cpu")
    settings = config.read(checkpoint)
    theirs = reference.model(folder).model.visual
    exact = load_tower(checkpoint, settings, cpu, torch.float32)
    short = load_tower(checkpoint, settings, cpu, torch.bfloat16)
    print(
        "| side | patches | transformers | float32 | ratio | bfloat16 | ratio |\n|---:|---:|---:|---:|---:|---:|---:|"
    )
    for side in given.sides:
        patch = settings.tower["patch_size"]
        grid = Grid(1, side // patch, side // patch)
        shape = torch.tensor([[grid.t, grid.h, grid.w]])
        best = dict.fromkeys(("theirs", "exact", "short"), float("inf"))
        for _ in range(given.runs):
            patches = torch.randn(grid.patches, 3 * settings.tower["temporal_patch_size"] * patch**2)
            passes: dict[str, Callable[[], object]] = {
                "theirs": partial(theirs, patches, grid_thw=shape),
                "exact": partial(exact, patches, [grid]),
                "short": partial(short, patches.bfloat16(), [grid]),
            }
            for name, run in passes.items():
                started = time.process_time()
                run()
                best[name] = min(best[name], time.process_time() - started)
        ours = (f"{best[name] * 1e3:.0f} ms | {best[name] / best['theirs']:.2f}" for name in ("exact", "short"))
        print(f"| {side} | {grid.patches} | {best['theirs'] * 1e3:.0f} ms | {' | '.join(ours)} |", flush=True)


if __name__ == "__main__":
    main()
