"""The type of weights in memory: what they may be rounded to, and 16 bits if that loses nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

W8A8 = "w8a8"
_NARROW = torch.bfloat16, torch.float16
_AT_ONCE = 64
"""Rows of a weight that are compared at a time."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """What is rounded before a product: weights to `int8`, and with `inputs` rows as well; to `bfloat16`, on CPUs that
    multiply it faster, rows, and weights with at least as many bits."""

    int8: bool = False
    bfloat16: bool = False
    inputs: bool = False

    @classmethod
    def of(cls, weight_dtype: str, *, bfloat16: bool = False) -> Rounded:
        """As --weight-dtype says: "", int8 or w8a8."""
        return cls(int8=weight_dtype in ("int8", W8A8), bfloat16=bfloat16, inputs=weight_dtype == W8A8)


EXACT = Rounded()


def narrowed(weight: Tensor) -> Tensor:
    """A float32 weight [n, k] in 16 bits if they have all of its numbers; else, or of another type, as it is."""
    for dtype in _NARROW if weight.dtype == torch.float32 else ():
        if all(torch.equal(part.to(dtype).float(), part) for part in weight.split(_AT_ONCE)):
            return weight.to(dtype)
    return weight
