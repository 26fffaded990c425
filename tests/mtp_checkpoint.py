"""The tiny checkpoint of Qwen3.5 with a layer for multi-token prediction."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def with_mtp_layer(checkpoint: Path, folder: Path) -> Path:
    """A copy in an empty folder that has such a layer: its attention layer's shapes, other numbers."""
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    weights, random = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(3)
    prefix = "model.language_model.layers.3."
    made = {name.replace(prefix, "mtp.layers.0."): each for name, each in weights.items() if name.startswith(prefix)}
    shapes = {name: each.shape for name, each in made.items()}
    shapes |= {f"mtp.{name}.weight": (64,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    shapes["mtp.fc.weight"] = torch.Size((64, 128))
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=random)
        weights[name] = noise * (0.1 if len(shape) == 1 else 1.3 / shape[-1] ** 0.5)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
