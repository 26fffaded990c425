"""Ranks of a group that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from llm_service.layers.tensor_parallel import TensorGroup


class Meeting:
    """Where the threads of a group put their tensors, and find all of them."""

    def __init__(self, size: int) -> None:
        self._barrier, self._given = threading.Barrier(size, timeout=180), dict[int, Tensor]()

    def all_of(self, rank: int, x: Tensor) -> list[Tensor]:
        self._given[rank] = x.clone()
        self._barrier.wait()
        found = [self._given[each] for each in sorted(self._given)]
        self._barrier.wait()
        return found

    def leave(self) -> None:
        self._barrier.abort()


class ThreadGroup(TensorGroup):
    """As TensorGroup, of threads."""

    def __init__(self, rank: int, size: int, meeting: Meeting, *, expert_parallel: bool = False) -> None:
        super().__init__(rank, size, expert_parallel=expert_parallel)
        object.__setattr__(self, "_meeting", meeting)

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack(self._meeting.all_of(self.rank, x)).sum(0)  # type: ignore[attr-defined]

    def join(self, x: Tensor, total: int) -> Tensor:
        return torch.cat(self._meeting.all_of(self.rank, x), dim=1)  # type: ignore[attr-defined]


def on_ranks(size: int, compute: Callable[[TensorGroup], Any], *, expert_parallel: bool = False) -> list[Any]:
    """What each rank's thread returns."""
    meeting = Meeting(size)

    def run(rank: int) -> Any:
        try:
            with torch.inference_mode():
                return compute(ThreadGroup(rank, size, meeting, expert_parallel=expert_parallel))
        except BaseException:
            meeting.leave()
            raise

    with ThreadPoolExecutor(size) as pool:
        return [each.result() for each in [pool.submit(run, rank) for rank in range(size)]]
