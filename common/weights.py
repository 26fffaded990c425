"""Tensors out of a checkpoint, one at a time and only those that are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from common.checkpoint import Checkpoint


def load_tensors(checkpoint: Checkpoint, wanted: Callable[[str], str | None]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (new name, tensor) for each tensor whose name `wanted` maps to a new one; None leaves it unread."""
    for name, stored in load_slices(checkpoint, wanted):
        yield name, stored[:]


def load_slices(checkpoint: Checkpoint, wanted: Callable[[str], str | None]) -> Iterator[tuple[str, Any]]:
    """As `load_tensors`, but yields what reads a part when it is indexed, as a tensor is: `stored[0:8, 16:32]`.

    Files are opened one after the other and mapped, so that a tensor costs memory only while it is used.
    """
    by_file: dict[Path, list[tuple[str, str]]] = {}
    for name, info in checkpoint.tensors.items():
        if (renamed := wanted(name)) is not None:
            by_file.setdefault(info.file, []).append((name, renamed))
    for file, names in by_file.items():
        with safe_open(file, framework="pt") as tensors:
            for name, renamed in names:
                yield renamed, tensors.get_slice(name)
