"""`python -m benchmarks.real_shape FOLDER`: a checkpoint of Qwen3-VL-8B's shape with random weights, 17.5 GB.

For timing the services: `python -m benchmarks --only twinlens --model FOLDER`. Weights are drawn on a GPU, if there is
one, and written shard by shard to limit memory. It measures nothing.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.checkpoint import PIXELS
from benchmarks.shapes import MODEL, TINY, TINY_TOWER, TOWER
from common.hardware import default_device
from testkit.checkpoints import make_checkpoint

from transformers import AutoConfig, AutoModelForImageTextToText  # isort: skip

_SHARD = 4 << 30
TINY_TEXT = {name: value for name, value in TINY.items() if name not in ("vocab_size", "max_position_embeddings")}
"""Small, for the words of the tokenizer and prompts of some length."""


def write(
    folder: Path, text: Mapping[str, Any], vision: Mapping[str, Any], device: torch.device, shard: int = _SHARD
) -> Path:
    """Writes the checkpoint: bfloat16, in files of at most `shard` bytes, but for a tensor that is larger itself."""
    make_checkpoint("qwen3_vl", folder)  # the tokenizer, the template and the processors' files
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= text
    config["vision_config"] |= vision
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    _write(folder / "config.json", config)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        _write(folder / name, {**json.loads((folder / name).read_text()), "size": PIXELS})
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    shards = list(_shards(model.state_dict(), shard))
    places: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({name: drawn(name, like.shape, device).cpu() for name, like in names.items()}, folder / file)
        places |= dict.fromkeys(names, file)
    _write(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})
    return folder


def drawn(name: str, shape: torch.Size, device: torch.device) -> Tensor:
    """A weight, bfloat16: matrices keep the size of what goes through them, norms change nothing, biases are zero."""
    made = torch.empty(shape, dtype=torch.bfloat16, device=device)
    if made.dim() > 1:
        return made.normal_(0, math.prod(shape[1:]) ** -0.5)
    return made.fill_(0.0 if name.endswith("bias") else 1.0)


def _shards(tensors: Mapping[str, Tensor], most: int) -> Iterator[dict[str, Tensor]]:
    """The tensors in order, as many at a time as fit into `most` bytes."""
    part: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if part and sum(each.nbytes for each in part.values()) + tensor.nbytes > most:
            yield part
            part = {}
        part[name] = tensor
    yield part


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def main() -> None:
    """Writes it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_shape", description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder to write; 17.5 GB")
    parser.add_argument("--tiny", action="store_true", help="a test run with a small shape")
    given = parser.parse_args()
    text, vision = (TINY_TEXT, TINY_TOWER) if given.tiny else (MODEL["text_config"], TOWER)
    print(write(given.folder, text, vision, torch.device(default_device())))


if __name__ == "__main__":
    main()
