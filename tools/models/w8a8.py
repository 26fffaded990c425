"""Checkpoints with 8-bit weights for products with 8-bit inputs, in llm-compressor's format (compressed-tensors,
W8A8)."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_WEIGHTS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
_INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
W8A8: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*visual.*"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS, "input_activations": _INPUTS}},
}
"""What config.json says of one."""
_TEXT = re.compile(r"(?!.*(visual|lm_head)).*_proj\.weight")
_STEPS = 127.5
"""As compressed-tensors divides an output's largest number."""


def to_w8a8(source: Path, folder: Path) -> Path:
    """Writes a checkpoint whose text layers' matrices are rounded to 8 bits, each output with a scale in the weight's
    own type."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*", "complete"))
    tensors: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if _TEXT.fullmatch(name):
                scale = (tensor.abs().amax(1, keepdim=True).float() / _STEPS).to(tensor.dtype)
                rounded = (tensor.float() / scale.float()).round_().clamp_(-128, 127)
                tensors |= {name: rounded.to(torch.int8), f"{name}_scale": scale}
            else:
                tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"quantization_config": W8A8}, indent=2), "utf-8")
    return folder
