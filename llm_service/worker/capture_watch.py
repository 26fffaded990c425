"""Finds what keeps a pass from being captured in a CUDA graph: the host waits for the device, or numbers are copied
from host memory. Watches a pass operator by operator, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITING = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::_unique2",
        "aten::bincount",
        "aten::equal",
        "aten::masked_select",
        "aten::nonzero",
        "aten::nonzero_numpy",
        "aten::repeat_interleave.Tensor",
        "aten::unique_consecutive",
        "aten::unique_dim",
        "transformers::grouped_mm_fallback",
    }
)
"""Operators whose result, or its shape, the host waits for."""
_INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})
"""Operators that wait if an index is a mask."""
_FROM_HOST = frozenset({"aten::_to_copy", "aten::copy_", "aten::lift_fresh"})
"""Operators that copy even a single number from the host to a device; others take it as an argument. The last one is
what dispatch shows of `torch.tensor`."""


_GROUPED = "aten::_grouped_mm"
_BY_ITSELF = (9, 10)
"""Compute capabilities on which grouped products read the groups' sizes from the device, in bfloat16."""


def _asks_for_sizes(x: Tensor) -> bool:
    """Whether a grouped product makes the host wait for the sizes, which no operator shows."""
    if x.device.type != "cuda":
        return False
    return x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device)[0] not in _BY_ITSELF


def _moves(name: str, given: Sequence[Tensor], out: Tensor) -> bool:
    """Whether numbers go from a device to the host, or to a device from memory of the host that is not locked."""
    if name.startswith("aten::new_") or name.endswith("_like"):  # of another tensor's type, and without its numbers
        return False
    if out.device.type == "cpu":
        return any(each.device.type != "cpu" for each in given)
    copies = name in _FROM_HOST
    here = any(each.device.type == "cpu" and (copies or each.dim() > 0) for each in given)
    return here or name == "aten::lift_fresh"


class WaitWatch(TorchDispatchMode):
    """Stores in `waits` the name of the first operator that a graph cannot hold, on any device."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Computes as without."""
        given = kwargs or {}
        out = func(*args, **given)
        name = func._schema.name
        full = f"{name}.{func._schema.overload_name}".rstrip(".")
        by_mask = name in _INDEXING and any(
            each.dtype == torch.bool for each in tree_leaves(args[1]) if isinstance(each, Tensor)
        )
        tensors = [each for each in tree_leaves((args, given)) if isinstance(each, Tensor)]
        moves = isinstance(out, Tensor) and _moves(name, tensors, out)
        asks = name == _GROUPED and _asks_for_sizes(tensors[0])
        if not self.waits and (by_mask or moves or asks or not _WAITING.isdisjoint({name, full})):
            self.waits = full
        return out
