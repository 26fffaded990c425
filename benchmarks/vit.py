"""`python -m benchmarks.vit`: the vision tower of Qwen3-VL-8B with random weights on a GPU: eager and by graph.

For each mix of pictures and each attention back end: milliseconds of a pass, eager and replayed; the host's time; and
the share of the arithmetic in the GPU's data sheet, which is the peer. A second table shows a batch's work before and
after its pass, which overlaps with other batches' passes: patches of pixels, a tenth larger than the tower needs them;
tables of the pass; and copying rows into pageable memory. Passes take turns. A mix's random patches are *repeated* in
every pass; nothing caches patches, so there are no hits to count.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.device import Machine, add_options, head, line, machine, ms, timed
from benchmarks.shapes import TINY_TOWER, TOWER, patch_numbers, tower_operations
from common.media.item import Grid
from encoder_service.families.pixel_settings import PixelSettings
from encoder_service.families.qwen_processors import ImageProcessor
from encoder_service.models.attention import BACKENDS, candidates
from encoder_service.models.qwen3_vl import Qwen3VLTower
from encoder_service.worker.graphs import LADDER, GraphedTower
from encoder_service.worker.patches import preprocess
from encoder_service.worker.row_ring import exit_of

MIXES = {
    "256 × 256": [Grid(1, 16, 16)],
    "512 × 512": [Grid(1, 32, 32)],
    "1024 × 1024": [Grid(1, 64, 64)],
    "8 of 256 × 256": [Grid(1, 16, 16)] * 8,
    "5 of mixed sizes": [Grid(1, 16, 24), Grid(1, 40, 30), Grid(1, 8, 8), Grid(1, 50, 20), Grid(1, 30, 30)],
    "8 frames of 448 × 448": [Grid(4, 28, 28)],
}
TINY_MIXES = {"one": [Grid(1, 4, 6)], "two": [Grid(1, 2, 2), Grid(2, 4, 4)]}


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
    here: Machine,
    backends: Sequence[str],
    mixes: Mapping[str, list[Grid]],
    budgets: Sequence[int] = LADDER,
) -> Iterator[str]:
    """The first table's rows."""
    made = tower(shape, here.device, here.dtype)
    for name in backends:
        made.backend = BACKENDS[name]()
        made.capturable = [made.backend]
        graphs = None
        if here.capture is not None and made.backend.stable(budgets[0], budgets[0], here.device) is not None:
            capture = here.capture()
            graphs = GraphedTower(made, budgets, capture, max_bytes=16 << 30, device=here.device, dtype=here.dtype)
        for mix, grids in mixes.items():
            inputs = _drawn(shape, here, grids)
            found = timed(_passes(made, graphs, inputs, grids), here.runs, here.device)
            eager, graph = found["eager"], found.get("graph", (float("nan"),) * 2)
            share = tower_operations(shape, grids) / min(whole for whole, _ in found.values()) / here.peaks.operations
            here.keep(table="vit", mix=mix, patches=len(inputs), attention=name, seconds=found, share=share)
            times = [*map(ms, (eager[0], graph[0])), f"{graph[0] / eager[0]:.2f}", *map(ms, (eager[1], graph[1]))]
            yield line([mix, len(inputs), name, *times, f"{share:.0%}"])


@torch.inference_mode()
def stages(shape: Mapping[str, Any], here: Machine, mixes: Mapping[str, list[Grid]]) -> Iterator[str]:
    """The second table's rows."""
    made, way_out = tower(shape, here.device, here.dtype), exit_of(here.device)
    settings = PixelSettings(
        min_pixels=1,
        max_pixels=1 << 30,
        patch=shape["patch_size"],
        temporal=shape["temporal_patch_size"],
        merge=shape["spatial_merge_size"],
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
        rescale=1 / 255,
    )
    processor = ImageProcessor(settings)
    for mix, grids in mixes.items():
        pictures = [(_pixels(grid, settings.patch), grid) for grid in grids]
        computed = made(_drawn(shape, here, grids), grids).contiguous().view(-1).view(torch.uint8)
        target = torch.zeros(len(computed), dtype=torch.uint8)

        def patches(pictures: Sequence[tuple[Tensor, Grid]] = pictures) -> list[Tensor]:
            sizes = [(grid.h * settings.patch, grid.w * settings.patch) for _, grid in pictures]
            moved = [pixels.to(here.device) for pixels, _ in pictures]
            return [preprocess(*each, processor) for each in zip(moved, sizes, strict=True)]

        passes: dict[str, Callable[[], object]] = {
            "patches": patches,
            "tables": lambda grids=grids: made.prepare(grids, here.device),  # type: ignore[misc]
            "rows out": lambda rows=computed, to=target: way_out.fetch([(rows, to)], way_out.mark()),  # type: ignore[misc]
        }
        found = {name: whole for name, (whole, _) in timed(passes, here.runs, here.device).items()}
        rate = len(computed) / found["rows out"]
        here.keep(table="vit stages", mix=mix, row_bytes=len(computed), seconds=found)
        yield line([mix, sum(grid.patches for grid in grids), *map(ms, found.values()), f"{rate / 1e9:.1f} GB/s"])


def _drawn(shape: Mapping[str, Any], here: Machine, grids: Sequence[Grid]) -> Tensor:
    """Random patches."""
    patches = sum(grid.patches for grid in grids)
    return torch.randn(patches, patch_numbers(shape), device=here.device, dtype=here.dtype)


def _pixels(grid: Grid, patch: int) -> Tensor:
    """Random pixels [frames, height, width, 3], as large as a decoder leaves them."""
    frames = 1 if grid.t == 1 else 2 * grid.t
    size = (frames, grid.h * patch * 11 // 10, grid.w * patch * 11 // 10, 3)
    return torch.randint(0, 256, size, dtype=torch.uint8)


def _passes(
    made: Qwen3VLTower, graphs: GraphedTower | None, inputs: Tensor, grids: list[Grid]
) -> dict[str, Callable[[], object]]:
    passes: dict[str, Callable[[], object]] = {"eager": lambda: made(inputs, grids)}
    if graphs is not None:
        passes["graph"] = lambda: graphs(inputs, grids)
    return passes


def main() -> None:
    """Measures and prints both tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vit", description=__doc__)
    add_options(parser, 20)
    given = parser.parse_args()
    here = machine(parser, given)
    shape, mixes, budgets = (TINY_TOWER, TINY_MIXES, (32, 64)) if given.tiny else (TOWER, MIXES, LADDER)
    backends = candidates(here.device, here.dtype)
    names = ["pictures", "patches", "attention", "eager", "graph", "ratio", "host, eager", "host, graph", "of peak"]
    print("\n" + head(names))
    for row in rows(shape, here, backends, mixes, budgets):
        print(row, flush=True)
    print("\n" + head(["pictures", "patches", "patches of pixels", "tables", "rows out", "rate"]))
    for row in stages(shape, here, mixes):
        print(row, flush=True)


if __name__ == "__main__":
    main()
