"""Whether a step of the library's text model can be captured in a CUDA graph: tried by one, since its Python may look
at what the device has computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llm_service.models.library_decoder import LibraryDecoder
from llm_service.worker.caches import Caches
from llm_service.worker.graphs import GraphNumbers

_TOKENS = 2
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
    }
)
"""Operators whose result, or its shape, the host waits for."""
_INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})
"""Those that do where an index is a mask."""
_FROM_HOST = frozenset({"aten::_to_copy", "aten::copy_", "aten::lift_fresh"})
"""Those that take even a single number of the host's to a device by a copy; others have it as an argument. The last is
what is seen of `torch.tensor`, whose result it is given."""


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
    """Has in `waits` the name of the first operator, on whatever device, that a graph cannot hold."""

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
        if not self.waits and (by_mask or moves or not _WAITING.isdisjoint({name, full})):
            self.waits = full
        return out


@torch.inference_mode(mode=False)  # where the host's look at a number is hidden from a mode
@torch.no_grad()
def what_waits(decoder: LibraryDecoder, caches: Caches) -> str:
    """Why there are no graphs of a decoder whose caches follow metadata; empty where nothing is in the way. A step of
    padding is computed, as it is when a graph is captured."""
    null_slot = caches.null_block * caches.block_size
    numbers = GraphNumbers.padding(_TOKENS, _TOKENS, 0, caches.tiling, null_slot, decoder.device)
    table = torch.zeros(_TOKENS, 1, dtype=torch.int32, device=decoder.device)
    batches = caches.batches_over(numbers.metadata(table, longest_query=1, longest=caches.block_size), {})
    hidden = torch.zeros(_TOKENS, decoder.hidden_size, dtype=decoder.dtype, device=decoder.device)
    ids = torch.zeros(_TOKENS, dtype=torch.int32, device=decoder.device)
    watch = WaitWatch()
    with watch:
        decoder(hidden, numbers.positions, caches.layers, batches, None, token_ids=ids)
    return f"the library waits for what the device has computed ({watch.waits})" if watch.waits else ""
