"""LoRA adapters of random weights in peft's form, as small or as bad as a test wants them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
GATED_DELTA_NET = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
ALL = (*ATTENTION, *MLP, *GATED_DELTA_NET)

_WHERE = re.compile(r"^model\.(language|text)_model\.layers\.\d+\.")


def make_adapter(
    directory: Path,
    folder: Path,
    *,
    seed: int,
    rank: int = 4,
    modules: Sequence[str] = ALL,
    strength: float = 1.0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Writes an adapter for a checkpoint's decoder into a folder: of matrices by their names' last parts, but experts'
    and routers'. Rows change by about `strength` times what the base makes of them."""
    from testkit import reference

    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in reference.model(directory).named_parameters():
        module = name.removesuffix(".weight")
        if name == module or not _WHERE.match(name) or weight.dim() != 2:
            continue
        if module.rpartition(".")[2] in modules and ".experts." not in name:
            outputs, inputs = weight.shape
            size = float(weight.detach().std()) * strength / math.sqrt(rank)
            tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, inputs, generator=random).to(dtype)
            b = torch.randn(outputs, rank, generator=random) * size
            tensors[f"base_model.model.{module}.lora_B.weight"] = b.to(dtype)
    return write(folder, tensors, {"r": rank, "lora_alpha": rank, "target_modules": list(modules), **config})


def write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    """Writes the two files as they are given, but for what every adapter says."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "bias": "none", "base_model_name_or_path": None, **config}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder
