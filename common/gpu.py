"""The beginning of a process's work on a GPU."""

from __future__ import annotations

import torch

from common.checkpoint import CheckpointError


def use_gpu(device: torch.device) -> None:
    """Makes a GPU the current one: Triton launches there, wherever the tensors are. Raises CheckpointError where this
    torch cannot."""
    if not torch.cuda.is_available():
        raise CheckpointError(
            f"torch {torch.__version__} cannot use {device}: install a build of it for this driver, or say --device cpu"
        )
    torch.cuda.set_device(device)
