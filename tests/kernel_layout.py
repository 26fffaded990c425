"""How tensors lie that a GPU kernel of ours is given. It has their addresses and no more: rows that are apart are right
where it is told by how much, and everything else has to lie together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_OTHERS = {"x": ("row",), "logits": ("row", "stride"), "block_table": ("table_stride",)}
"""What says of a parameter how far its rows are apart, but for `NAME_row` and `NAME_stride`."""

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "turned": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "cut": lambda x: torch.stack((x, x), -1).flatten(-2)[..., ::2],
}
"""Others than in order: what comes first last, and each number beside another one."""


def check(kernel: str, names: Sequence[str], args: Sequence[Any], constants: Mapping[str, Any]) -> None:
    """Fails where a tensor lies otherwise than a kernel with parameters of these names takes it to. Rows of `NAME` are
    `NAME_row` or `NAME_stride` apart, and heads within them `NAME_HEAD`, where there are such parameters."""
    given = dict(zip(names, args, strict=False)) | constants
    for name, tensor in given.items():
        if isinstance(tensor, Tensor):
            told = (f"{name}_row", f"{name}_stride", *_OTHERS.get(name, ()), f"{name.upper()}_HEAD")
            right = _lies(tensor, [given[each] for each in told if each in given])
            assert right, f"{kernel} takes {name} {tuple(tensor.shape)} to lie otherwise than by {tensor.stride()}"


def _lies(tensor: Tensor, told: Sequence[int]) -> bool:
    """Whether its first strides are as told, and the others those of a tensor with nothing between its numbers."""
    expected = [*told, *(math.prod(tensor.shape[at:]) for at in range(len(told) + 1, tensor.dim() + 1))]
    places = zip(tensor.shape, tensor.stride(), expected, strict=True)
    return tensor.numel() == 0 or all(size == 1 or stride == step for size, stride, step in places)


def watch() -> None:
    """Has every launch in Triton's interpreter checked, in this process."""
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def checked(self: Any, *args: Any, **given: Any) -> Any:
        check(self.fn.__name__, self.arg_names, args, given)
        return run(self, *args, **given)

    InterpretedFunction.run = checked
