"""Checkpoints that state scales of keys and values, as each maker of them does."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
COMPRESSED = {"quant_method": "compressed-tensors"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
STATED: dict[str, tuple[dict[str, Any], str, bool]] = {
    "compressed-tensors": ({**COMPRESSED, "kv_cache_scheme": FP8}, "self_attn.{}_scale", False),
    "a scale a head": (
        {**COMPRESSED, "kv_cache_scheme": {**FP8, "strategy": "attn_head"}},
        "self_attn.{}_scale",
        True,
    ),
    "AutoFP8": ({"quant_method": "fp8", "kv_cache_scheme": "static"}, "self_attn.{}_proj.output_scale", False),
    "modelopt": (MODELOPT, "self_attn.{0}_proj.{0}_scale", False),
}
"""What quantization_config says of a cache, the name of a scale, and whether each head has one."""
WEIGHTS = {"AutoFP8": "fp8 in blocks", "compressed-tensors": "float-quantized, one scale"}
"""Of the others nothing has quantised these."""
_LAYER = re.compile(r"(.*layers\.(\d+)\.)self_attn\.k_proj\.(weight|weight_packed|qweight)")

Scales = Mapping[int, tuple[Tensor, Tensor]]
"""By layer, of keys and of values."""


def publish(source: Path, folder: Path, form: str, heads: int = 2) -> Scales:
    """A checkpoint that states scales in this form, by which many numbers are cut off or hardly told apart."""
    stated, name, apart = STATED[form]
    if source != folder:
        shutil.copytree(source, folder)
    generator, tensors, found = torch.Generator().manual_seed(5), load_file(folder / "model.safetensors"), {}
    for stored in list(tensors):
        if layer := _LAYER.fullmatch(stored):
            drawn = torch.rand(2, heads if apart else 1, generator=generator) + 0.5
            key, value = drawn[0] * 2e-3, drawn[1] * 2
            shape = (heads, 1, 1) if apart else () if form == "modelopt" else (1,)
            for kind, scale in (("k", key), ("v", value)):
                tensors[layer[1] + name.format(kind)] = scale.view(shape).clone()
            tensors[layer[1] + "self_attn.q_scale"] = torch.ones(1)
            found[int(layer[2])] = key, value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {**config.get("quantization_config", {}), **stated}
    path.write_text(json.dumps(config))
    return found
