"""The tensor-parallel group as layers see it: which part of a dimension is a rank's, and how parts are combined.

Columns of a first product and rows of the next are split (Shoeybi et al. 2019), so that a block needs one sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

_MAGNITUDE, _BELOW_ALL = (1 << 31) - 1, -(1 << 63)
"""All bits of an int32 but its sign; less than the key of any value, see `TensorGroup.first_of_highest`."""


class Sums(Protocol):
    """Another way to sum over the ranks, for some tensors; the choice is the same on every rank."""

    def takes(self, x: Tensor, /) -> bool:
        """Whether `sum` does."""
        ...

    def sum(self, x: Tensor, /) -> Tensor:
        """As `TensorGroup.sum`."""
        ...


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Rank `rank` of `size`; a group of one does not communicate. `sums` take precedence over the process group's. With
    `expert_parallel` each rank has some experts whole, instead of a part of each."""

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None
    sums: Sums | None = None
    expert_parallel: bool = False

    def with_sums(self, sums: Sums) -> Self:
        """The same group with these sums."""
        return replace(self, sums=sums)

    def with_whole_experts(self) -> Self:
        """The same group, `expert_parallel`."""
        return replace(self, expert_parallel=True)

    def on_hosts(self) -> TensorGroup:
        """The same ranks with the CPU process group: for computations before devices are used."""
        return self if self.process_group is None else replace(self, process_group=dist.group.WORLD, sums=None)

    def partition(self, total: int) -> slice:
        """This rank's part of a dimension that the group's size divides; raises ValueError where it does not.

        >>> TensorGroup(1, 2).partition(6)
        slice(3, 6, None)
        """
        if total % self.size:
            raise ValueError(f"{total} cannot be split over {self.size} ranks: --tp must divide it")
        part = total // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def expert_partition(self, experts: int, inner: int) -> tuple[slice, slice]:
        """Which experts this rank has, and which part of the inner dimension of each. Raises ValueError as `partition`.

        >>> TensorGroup(1, 2).expert_partition(6, 8)
        (slice(0, 6, None), slice(4, 8, None))
        >>> TensorGroup(1, 2, expert_parallel=True).expert_partition(6, 8)
        (slice(3, 6, None), slice(0, 8, None))
        """
        if not self.expert_parallel:
            return slice(0, experts), self.partition(inner)
        if experts % self.size:
            raise ValueError(
                f"{experts} experts cannot be given whole to {self.size} ranks: --tp must divide their number"
            )
        return self.partition(experts), slice(0, inner)

    def vocab_partition(self, total: int) -> slice:
        """This rank's part of the vocabulary, which need not be divisible: the last parts may be shorter, or empty."""
        part = -(-total // self.size)
        return slice(min(total, self.rank * part), min(total, (self.rank + 1) * part))

    def kv_partition(self, kv_heads: int) -> slice:
        """This rank's KV heads; where ranks outnumber them, several ranks hold the same one.

        >>> [TensorGroup(rank, 4).kv_partition(2) for rank in range(4)]
        [slice(0, 1, None), slice(0, 1, None), slice(1, 2, None), slice(1, 2, None)]
        """
        if self.size <= kv_heads:
            return self.partition(kv_heads)
        if self.size % kv_heads:
            fits = f"--tp must divide {kv_heads}, or be a multiple of it"
            raise ValueError(f"{kv_heads} KV heads cannot be shared by {self.size} ranks: {fits}")
        head = self.rank * kv_heads // self.size
        return slice(head, head + 1)

    def all_reduce_min(self, number: int) -> int:
        """The smallest of all ranks' numbers, on every rank, once all of them have asked."""
        if self.process_group is None:
            return number
        smallest = torch.tensor([number])
        dist.all_reduce(smallest, dist.ReduceOp.MIN)  # over the default group, which is the CPUs'
        return int(smallest)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, on every rank; may overwrite x."""
        if self.sums is not None and self.sums.takes(x):
            return self.sums.sum(x)
        if self.process_group is not None:
            dist.all_reduce(x, group=self.process_group)
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x, of the same shape and type on every rank, which is overwritten on the others."""
        if self.process_group is not None:
            dist.broadcast(x, group=self.process_group, group_src=0)
        return x

    def join(self, x: Tensor, total: int) -> Tensor:
        """All ranks' parts [m, part] of a vocabulary, side by side: [m, total], on every rank."""
        if self.process_group is None:
            return x
        part = -(-total // self.size)
        padded = x.new_zeros(x.shape[0], part)
        padded[:, : x.shape[1]] = x
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self.process_group)
        return torch.cat(parts, dim=1)[:, :total]

    def first_of_highest(self, x: Tensor, total: int) -> Tensor:
        """All ranks' parts float32 [m, part] of a vocabulary → int64 [m], the index of the highest value of all, on
        every rank; the first of equal ones, and NaN counts as highest, as in `Tensor.argmax`."""
        if self.process_group is None:
            return x.argmax(-1)
        keys = x.new_full((len(x),), _BELOW_ALL, dtype=torch.int64)
        if x.shape[1]:
            own = x.argmax(-1)
            highest = x.gather(1, own.unsqueeze(1)).squeeze(1) + 0.0  # of the two zeros one
            bits = highest.view(torch.int32)
            order = (bits ^ ((bits >> 31) & _MAGNITUDE)).masked_fill(highest.isnan(), _MAGNITUDE)
            keys = (order.long() << 32) + (_MAGNITUDE - self.vocab_partition(total).start - own)
        dist.all_reduce(keys, dist.ReduceOp.MAX, group=self.process_group)
        return _MAGNITUDE - (keys & _MAGNITUDE)


ALONE = TensorGroup()
"""The group of one rank."""
