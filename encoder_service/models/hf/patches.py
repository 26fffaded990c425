"""Convolutions of transformers' towers whose every input is one patch become one product of all patches."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


def multiply_patches(model: nn.Module) -> int:
    """Has convolutions over two or three axes computed as products if their kernel fits their input only once; returns
    how many may be. A convolution with many such inputs is several times slower."""
    found = 0
    for part in model.modules():
        if type(part) in _ONE_PLACE and part.padding_mode == "zeros" and part.groups == 1:
            part.__class__ = _ONE_PLACE[type(part)]
            found += 1
    return found


def _product(part: nn.Conv2d | nn.Conv3d, x: Tensor) -> Tensor | None:
    """x [n, channels, …] → [n, outputs, 1, …] if the kernel fits x once; None if it fits more often, or is dilated."""
    axes = len(part.kernel_size)
    alone = x.dim() == axes + 2 and tuple(x.shape[2:]) == tuple(part.kernel_size)
    if not alone or any(size != 1 for size in part.dilation) or any(size != 0 for size in part.padding):
        return None
    rows = functional.linear(x.flatten(1), part.weight.flatten(1), part.bias)
    return rows.view(*rows.shape, *(1,) * axes)


class _Conv2d(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        found = _product(self, x)
        return super().forward(x) if found is None else found


class _Conv3d(nn.Conv3d):
    def forward(self, x: Tensor) -> Tensor:
        found = _product(self, x)
        return super().forward(x) if found is None else found


_ONE_PLACE: dict[type[nn.Module], type[nn.Module]] = {nn.Conv2d: _Conv2d, nn.Conv3d: _Conv3d}
