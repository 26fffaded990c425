"""Towers that CUDA graphs can capture: `python -m tools.models.graphs [KIND …]` captures small models on a CPU, where
a replay runs a pass's operators again, and compares rows of other items to the bit."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from common.checkpoints.checkpoint import CheckpointError
from common.gpu.graphs import Capture
from common.hf import models as hf_models
from common.hf.classes import first_line
from encoder_service.models.hf.tower import HfTower
from encoder_service.models.processor import ItemProcessor
from encoder_service.worker.hf.batches import Made, shape_of
from encoder_service.worker.hf.graphs import ShapeGraphs
from encoder_service.worker.hf.runner import noisy_sound, picture
from tools.models.recipes import RECIPES
from tools.models.tiny import make

SIDES = (64, 48)
SECONDS = 2


class Again:
    """Captures by keeping the callable."""

    held = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        return run


_CPU = torch.device("cpu")


@torch.inference_mode()
def graphs_of(
    folder: Path, capture: Capture, device: torch.device = _CPU, *, modality: str = "image", several: bool = False
) -> tuple[str, list[str]] | None:
    """Why items of a modality, or `several` in a pass, have no graphs, empty where they have, and by what the host
    looks at their content; None where a checkpoint takes none. Raises CheckpointError, RuntimeError and ValueError
    where no rows are computed at all."""
    found = hf_models.describe(folder)
    if modality not in found.placeholders:
        return None
    tower, processor = HfTower(folder, found, torch.float32, device), ItemProcessor(folder)
    items: list[Made] = []
    tokens = 0
    for seed in range(2):
        shown = picture(SIDES, seed) if modality == "image" else noisy_sound(SECONDS, found.sound_rate, seed)
        tokens = sum(part.rows for part in processor.replacement(shown))
        known = tower.known(processor.inputs(shown), modality)
        items.append(Made(modality, tower.placed(known, modality), shape=shape_of(modality, known)))
    if items[0].shape is None or items[0].shape != items[1].shape:
        return "nothing says which items are of one shape", []
    graphs = ShapeGraphs(tower, capture, max_bytes=1 << 32)
    why = graphs.add((items[0], items[1]), tokens, several=several)
    return why, graphs.looks


def found_of(kinds: list[str], modality: str) -> Iterator[tuple[str, str, list[str]]]:
    """Of those that take items of a modality, the same."""
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = graphs_of(make(kind, Path(folder)), Again(), modality=modality)
            except (CheckpointError, RuntimeError, ValueError, ImportError) as error:
                found = f"it computes no rows: {first_line(error)}", []
        if found is not None:
            yield kind, *found


def main() -> None:
    """Prints a line for each kind, and how many have graphs."""
    parser = argparse.ArgumentParser(prog="python -m tools.models.graphs", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", default=sorted(RECIPES))
    parser.add_argument("--sounds", action="store_true", help="models that hear instead of those that see")
    given, captured, asked = parser.parse_args(), 0, 0
    for kind, why, looks in found_of(given.kinds, "audio" if given.sounds else "image"):
        print(f"{kind}: {why or 'graphs'}{', the host looks: ' * bool(looks)}{', '.join(looks)}", flush=True)
        captured, asked = captured + (not why), asked + 1
    print(f"{captured} of {asked}")


if __name__ == "__main__":
    main()
