"""LoRA adapters of random weights in peft's form, and the library's model with one merged into it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
GATED_DELTA_NET = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
ALL = (*ATTENTION, *MLP, *GATED_DELTA_NET)

_WHERE = re.compile(r"^model\.language_model\.layers\.\d+\.")


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
    from tests import reference

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


@contextmanager
def merged(directory: Path, folder: Path | None) -> Iterator[None]:
    """Meanwhile the library's model of a checkpoint has W + s B A in place of W."""
    from tests import reference

    model = reference.model(directory)
    before: dict[str, torch.Tensor] = {}
    if folder is not None:
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
        scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
        for name, a in tensors.items():
            if ".lora_A." in name:
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                weight = model.get_parameter(f"{module}.weight")
                before[module] = weight.detach().clone()
                b = tensors[name.replace(".lora_A.", ".lora_B.")]
                weight.data += scale * b.float() @ a.float()
    try:
        yield
    finally:
        for module, weight in before.items():
            model.get_parameter(f"{module}.weight").data.copy_(weight)
