"""Which of a tower's row kernels compute on a CPU in bfloat16, a fact of the process: torch's operators, or ours
(`common.cpu.short_rows`, `fused_block`) from where the attention back end that has them compiled says that they are
there."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor


class _State:
    kernels: ModuleType | None = None
    blocks: ModuleType | None = None


_state = _State()


def select(kernels: ModuleType | None, blocks: ModuleType | None = None) -> None:
    """Has these compute from now on, and blocks as a whole by `blocks`; None: torch's operators, and one thing after
    the other. To be called between two passes."""
    _state.kernels, _state.blocks = kernels, blocks


def kernels_for(x: Tensor) -> ModuleType | None:
    """Our kernels, if they compute x."""
    return _state.kernels if _takes(x) else None


def blocks_for(x: Tensor) -> ModuleType | None:
    """What computes blocks of x as a whole (`fused_block`), if anything does."""
    return _state.blocks if _takes(x) else None


def _takes(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.device.type == "cpu"
