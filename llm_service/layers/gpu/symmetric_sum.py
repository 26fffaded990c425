"""All-reduce over the ranks of one host by torch's symmetric memory: each GPU reads the others' summands in place,
which for the few rows of a decode step takes fewer hops than NCCL's ring. All ranks get the same bits: a sum is taken
in the order of the ranks, or by one rank for all."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from common.checkpoints.checkpoint import CheckpointError
from llm_service.layers.tensor_parallel import TensorGroup

CAPACITY = 8 << 20
"""Bytes of the longest sum. Longer ones go to NCCL, where the bandwidth of the links decides."""

ONE_SHOT = 1 << 20
"""Up to so many bytes read from other ranks, between two barriers, every rank sums everything itself. Above, each rank
sums a share and distributes it. Both bounds are of the size that others have found on NVLink; not measured here."""

_ALIGNMENT = 16
"""Bytes that the kernels load at once; sums of other lengths go to NCCL."""

_TYPES = torch.float32, torch.bfloat16
"""The dtypes that torch's kernels support."""


class SymmetricSum:
    """A place in each rank's memory that the others see; every rank has to make it, and to sum, in the same order.

    Sums wait for all ranks on the device, without a time limit, as captured ones of NCCL do: a lost rank is noticed by
    its missing beat (see `worker/ranks`). The place is free again when a sum is over, so one place does, as long as all
    sums are on one stream.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> None:
        """For sums of this dtype over a group whose ranks each have a GPU of this host. Raises ValueError for a dtype
        that cannot be summed, RuntimeError if these GPUs cannot read each other's memory."""
        if dtype not in _TYPES:
            raise ValueError(f"there are no sums in {dtype}")
        self._size, self._name, self._dtype = group.size(), group.group_name, dtype
        self._place = symmetric_memory.empty(CAPACITY // dtype.itemsize, dtype=dtype, device=device)
        self._multicast = symmetric_memory.rendezvous(self._place, self._name).multicast_ptr != 0

    def takes(self, x: Tensor) -> bool:
        """Whether `sum` does: the same on every rank, since the answer follows from shape and type."""
        size = x.nbytes
        return x.dtype == self._dtype and 0 < size <= CAPACITY and size % _ALIGNMENT == 0 and x.is_contiguous()

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, on every rank, in x or in another place."""
        ops = torch.ops.symm_mem
        place = self._place[: x.numel()].view(x.shape)
        if (self._size - 1) * x.nbytes <= ONE_SHOT:
            out: Tensor = ops.one_shot_all_reduce_copy(place, x, "sum", self._name)
            return out
        place.copy_(x)
        if self._multicast:  # the switch between GPUs adds
            ops.multimem_all_reduce_(place, "sum", self._name)
        else:
            ops.two_shot_all_reduce_(place, "sum", self._name)
        return x.copy_(place)

    def trial(self, expected: Callable[[Tensor], Tensor], rank: int) -> bool:
        """Whether both kinds of sums agree with another way to sum, which may overwrite its input. To be called by all
        ranks at once: each sums everything, whatever it finds."""
        numbers = torch.Generator(self._place.device).manual_seed(rank)
        within, found = 0.05 if self._dtype == torch.bfloat16 else 1e-5, list[bool]()
        for size in (4096, ONE_SHOT // (self._size - 1), CAPACITY):
            elements = size // _ALIGNMENT * _ALIGNMENT // self._dtype.itemsize
            x = torch.randn(elements, generator=numbers, device=self._place.device).to(self._dtype)
            other = expected(x.clone())
            found.append(torch.allclose(self.sum(x), other, rtol=within, atol=within))
        return all(found)


def with_symmetric_memory(group: TensorGroup, dtype: torch.dtype, device: torch.device) -> TensorGroup:
    """The group with sums by symmetric memory, after checking on every rank that they equal NCCL's. Raises
    CheckpointError."""
    assert group.process_group is not None, "there are several ranks"
    why, sums = "", None
    try:
        sums = SymmetricSum(group.process_group, device, dtype)
    except (ValueError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
    if not group.all_reduce_min(int(sums is not None)):
        raise CheckpointError(f"--symmetric-memory: {why or 'another rank has none'}")
    assert sums is not None, "this rank is one of all"
    if not group.all_reduce_min(int(sums.trial(group.sum, group.rank))):
        raise CheckpointError("--symmetric-memory: sums differ from those of NCCL on these GPUs")
    return group.with_sums(sums)
