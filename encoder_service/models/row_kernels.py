"""Which of a tower's row kernels compute on a CPU in bfloat16, a fact of the process: torch's operators, or ours
(`common.cpu.short_rows`) from where the attention back end that has them compiled says that they are there."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor


class _State:
    kernels: ModuleType | None = None


_state = _State()


def select(kernels: ModuleType | None) -> None:
    """Has these compute from now on; None: torch's operators. To be called between two passes."""
    _state.kernels = kernels


def kernels_for(x: Tensor) -> ModuleType | None:
    """Our kernels, if they compute x."""
    return _state.kernels if x.dtype == torch.bfloat16 and x.device.type == "cpu" else None
