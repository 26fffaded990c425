"""Which row kernels of a tower compute on a CPU in bfloat16, for the whole process: torch's operators, or ours
(`common.cpu.short_rows`, `fused_block`) once the attention back end that has them compiled reports that they are
ready."""

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
    """The module that computes whole blocks of x (`fused_block`); None if none does."""
    return _state.blocks if _takes(x) else None


def _takes(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.device.type == "cpu"
