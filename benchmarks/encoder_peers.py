"""The encoder's peers, in a separate process: `python -m benchmarks.encoder_peers MODEL THREADS`.

Each line on standard input, `PEER SIDE MARK …`, is answered by a JSON object of seconds by stage. The peers take turns
with the service, so that other load affects all alike, and make the same files from the marks. They cache nothing.

- `transformers`: a JPEG file through Pillow, transformers' image processor and its vision tower;
- `batch`: several files in the same way, as one batch;
- `bare`: our tower alone, on ready patches.
"""

from __future__ import annotations

import io
import itertools
import json
import sys
import time
from pathlib import Path

import torch
from PIL import Image

from benchmarks.workload import Mark, picture
from common.checkpoints.checkpoint import Checkpoint
from common.media.item import Grid
from encoder_service.families import config
from encoder_service.models.tower import load_tower
from testkit import reference


class Peers:
    """Both peers over one checkpoint, in float32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        self._processor = reference.processor(folder).image_processor
        self._visual = reference.model(folder).model.visual
        checkpoint = Checkpoint(folder)
        self._tower = load_tower(checkpoint, config.read(checkpoint), torch.device("cpu"), torch.float32)

    def transformers(self, data: bytes) -> dict[str, float]:
        """Seconds from a file to rows."""
        return self.batch(data)

    @torch.inference_mode()
    def batch(self, *files: bytes) -> dict[str, float]:
        """Seconds from files to all of their rows."""
        marks = [time.perf_counter()]
        images = [Image.open(io.BytesIO(data)).convert("RGB") for data in files]
        marks.append(time.perf_counter())
        inputs = self._processor(images=images, return_tensors="pt")
        marks.append(time.perf_counter())
        self._visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
        marks.append(time.perf_counter())
        decode, preprocess, vit = (end - begin for begin, end in itertools.pairwise(marks))
        return {"decode": decode, "preprocess": preprocess, "vit": vit, "all": marks[-1] - marks[0]}

    @torch.inference_mode()
    def bare(self, data: bytes) -> dict[str, float]:
        """Seconds of the forward pass."""
        image = Image.open(io.BytesIO(data)).convert("RGB")
        inputs = self._processor(images=[image], return_tensors="pt")
        grids = [Grid(*grid) for grid in inputs["image_grid_thw"].tolist()]
        started = time.perf_counter()
        self._tower(inputs["pixel_values"], grids)
        return {"vit": time.perf_counter() - started}


def main() -> None:
    """Answers until standard input ends."""
    torch.set_num_threads(int(sys.argv[2]))
    peers = Peers(Path(sys.argv[1]))
    print("ready", flush=True)
    for line in sys.stdin:
        peer, side, *marks = line.split()
        files = [picture(Mark.read(mark), int(side)) for mark in marks]
        print(json.dumps(getattr(peers, peer)(*files)), flush=True)


if __name__ == "__main__":
    main()
