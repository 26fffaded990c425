"""What type weights are kept in: what they may be rounded to, and 16 bits where nothing is lost by it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Rounded = Literal["", "int8", "bfloat16"]
"""What weights are rounded to, and multiplied as: nothing, 8 bits, or, on CPUs that multiply it faster, bfloat16."""

_NARROW = torch.bfloat16, torch.float16
_AT_ONCE = 64
"""Rows of a weight that are compared at a time."""


def narrowed(weight: Tensor) -> Tensor:
    """A float32 weight [n, k] in 16 bits if they have all of its numbers; else, or of another type, as it is."""
    for dtype in _NARROW if weight.dtype == torch.float32 else ():
        if all(torch.equal(part.to(dtype).float(), part) for part in weight.split(_AT_ONCE)):
            return weight.to(dtype)
    return weight
