"""Elementwise functions whose bits do not depend on a number's position, and so not on other tokens in the batch.

Torch's exp, log1p and tanh are such. Its sigmoid, silu, softplus and gelu of float32 on CPUs are not: numbers that do
not fill a vector at the end of a thread's share are computed by another formula.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

_GELU_SCALE = math.sqrt(2.0 / math.pi)
_FAINTEST = -60.0
"""e to this is 10^-26 of a number: out of sight of float32's digits, and of the eps of a norm behind it."""
_GELU_CUBE = 0.044715


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), in the type of x."""
    if _is_steady(x):
        return x.sigmoid()
    return x.neg().exp_().add_(1.0).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """x / (1 + e^-x), in the type of x."""
    return functional.silu(x) if _is_steady(x) else sigmoid(x).mul_(x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), in the type of x."""
    if _is_steady(x):
        return functional.softplus(x)
    return x.abs().neg_().exp_().log1p_().add_(x.clamp(min=0.0))


def gelu(x: Tensor) -> Tensor:
    """x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))), in the type of x."""
    if x.device.type != "cpu" or x.dtype == torch.float64:
        return functional.gelu(x, approximate="tanh")
    if x.dtype != torch.float32:
        return gelu(x.float()).to(x.dtype)
    return (x * x).mul_(_GELU_CUBE).add_(1.0).mul_(x).mul_(_GELU_SCALE).tanh_().add_(1.0).mul_(x).mul_(0.5)


def remainder(x: Tensor) -> Tensor:
    """What is left of a state: e^x, which is 0 where nothing can be seen of it. Processors take a hundred times as long
    for numbers that are too small to be normal."""
    return functional.threshold(x, _FAINTEST, -torch.inf).exp_()


def _is_steady(x: Tensor) -> bool:
    """Whether torch's own functions give a number the same digits wherever it lies."""
    return x.device.type != "cpu" or x.dtype != torch.float32
