"""Checkpoints as NVIDIA's Model Optimizer publishes them: some layers in one format, some in another, the rest in
floats, and experts in each of the layouts that its releases and the models have."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.quantized import modelopt

Experts = Literal["apart", "behind", "stacked"]
"""How experts that transformers stacks are stored: `experts.3.up_proj`, `experts.up_proj.3`, or as it does."""

_STACK = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")


def publish(
    source: Path,
    root: Path,
    algorithm: Callable[[str], str | None],
    *,
    experts: Experts = "apart",
    inputs_first: bool = False,
    swapped: bool = False,
) -> tuple[Path, Path]:
    """Two checkpoints: one whose weights are in the format that `algorithm` says by the tensor's name, None: as they
    were; one with the weights that they are. transformers' stacks are [experts, inputs, outputs] where they are
    `inputs_first`, the published ones as those, or the other way round, `swapped`."""
    torch.manual_seed(3)
    published, wide = root / "published", root / "wide"
    files: dict[Path, dict[str, Tensor]] = {published: {}, wide: {}}
    for folder in files:
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("model*.safetensors*"))
    used: set[str] = set()
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if (format_ := algorithm(name)) is None:
                files[published][name] = files[wide][name] = tensor
                continue
            used.add(format_)
            if stack := _STACK.fullmatch(name):
                plain = tensor.transpose(1, 2) if inputs_first else tensor
                make = _stacked if experts == "stacked" else _unstacked
                last = {"behind": experts == "behind", "inputs_first": inputs_first is not swapped}
                made, dequantized = make(stack, plain, format_, **last)
                files[published] |= made
                files[wide][name] = dequantized.transpose(1, 2) if inputs_first else dequantized
            else:
                _, parts, files[wide][name] = modelopt(format_)(tensor)
                files[published] |= {f"{name.removesuffix('weight')}{part}": each for part, each in parts.items()}
    for folder, content in files.items():
        tensors = {name: each.contiguous() for name, each in content.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    state(published, modelopt_config(*sorted(used)))
    return published, wide


def modelopt_config(*algorithms: str) -> dict[str, Any]:
    """What config.json states of weights in one format, or in several."""
    stated: dict[str, Any] = {"quant_method": "modelopt", "ignore": ["lm_head", "model.visual*"]}
    if len(algorithms) == 1:
        return stated | {"quant_algo": algorithms[0]}
    layers = {f"layer{number}": {"quant_algo": each} for number, each in enumerate(algorithms)}
    return stated | {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


def state(folder: Path, stated: dict[str, Any]) -> None:
    """Has a checkpoint's config.json say so."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": stated}))


def _unstacked(
    stack: re.Match[str], tensor: Tensor, format_: str, *, behind: bool, inputs_first: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """Each expert's matrices apart."""
    del inputs_first
    kinds = ("gate_proj", "up_proj") if stack[2] == "gate_up_proj" else ("down_proj",)
    made: dict[str, Tensor] = {}
    rebuilt = []
    for number, expert in enumerate(tensor):  # [out, in]
        alone = []
        for kind, matrix in zip(kinds, expert.chunk(len(kinds)), strict=True):
            _, parts, dequantized = modelopt(format_)(matrix.contiguous())
            alone.append(dequantized)
            path = f"{stack[1]}.{kind}.{number}" if behind else f"{stack[1]}.{number}.{kind}"
            made |= {f"{path}.{part}": each for part, each in parts.items()}
        rebuilt.append(torch.cat(alone))
    return made, torch.stack(rebuilt)


def _stacked(
    stack: re.Match[str], tensor: Tensor, format_: str, *, behind: bool, inputs_first: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """All experts in one tensor, with one scale over all of them where the format has one."""
    del behind
    count, outputs, inputs = tensor.shape
    _, parts, dequantized = modelopt(format_)(tensor.reshape(count * outputs, inputs))
    made = {}
    for part, each in parts.items():
        whole = each.view(count, outputs, *each.shape[1:]) if each.dim() and len(each) == count * outputs else each
        whole = whole.transpose(1, 2) if inputs_first and whole.dim() == 3 else whole
        made[stack[0] if part == "weight" else f"{stack[0]}_{part}"] = whole
    return made, dequantized.view(count, outputs, inputs)
