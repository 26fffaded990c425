"""The ranks of a tensor-parallel group: how they meet, how a step plan reaches them, how a lost one is noticed.

Rank 0 lives in the engine process and starts the others on its own host. Plans travel as msgpack over a Gloo group of
their own; layers sum over a second one (NCCL on GPUs). A rank that dies breaks the next collective at once; one that is
frozen breaks it after `timeout`. While there is nothing to compute, rank 0 sends empty plans, so that both also hold
for an idle group.
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # public, not re-exported for checkers

from llm_service.layers.group import TensorGroup

_HOST = "127.0.0.1"
_LOAD_SECONDS = 1800.0


class Ranks:
    """This process's membership of a group; `group` is what layers get."""

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, timeout: float) -> None:
        if device.type == "cpu":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        else:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=_LOAD_SECONDS)
        )
        limit = timedelta(seconds=timeout)
        self._plans = dist.new_group(backend="gloo", timeout=limit)
        self.group = TensorGroup(
            rank, size, dist.new_group(backend="gloo" if device.type == "cpu" else "nccl", timeout=limit)
        )

    def wait_for_all(self) -> None:
        """Returns when every rank has called it: after loading, which may take long."""
        dist.barrier()

    def tell(self, message: bytes) -> None:
        """Rank 0: sends a message to all others. Raises RuntimeError where one is gone or frozen."""
        dist.broadcast(torch.tensor([len(message)]), 0, group=self._plans)
        if message:
            dist.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), 0, group=self._plans)

    def hear(self) -> bytes:
        """The others: waits for rank 0's next message, which may be empty. Raises RuntimeError where it is gone."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, 0, group=self._plans)
        message = torch.empty(int(length), dtype=torch.uint8)
        if len(message):
            dist.broadcast(message, 0, group=self._plans)
        return message.numpy().tobytes()


def lead(size: int, device: str, timeout: float, arena_fd: int) -> Ranks:
    """Rank 0: starts the other ranks, which inherit the row arena, and waits until they have joined.

    They are killed by the kernel when this process ends.
    """
    store = TCPStore(_HOST, 0, size, is_master=True, wait_for_workers=False)
    for rank in range(1, size):
        command = [
            sys.executable,
            "-m",
            "llm_service.worker",
            *map(str, (rank, size, store.port, timeout, device, arena_fd)),
        ]
        environ = {**os.environ, "TWINLENS_PARENT": str(os.getpid())}
        subprocess.Popen(command, pass_fds=(arena_fd,), stdin=subprocess.DEVNULL, env=environ)
    return Ranks(store, 0, size, device_of(0, device), timeout)


def join(rank: int, size: int, port: int, device: str, timeout: float) -> Ranks:
    """Another rank: joins the group whose store is at `port`."""
    return Ranks(TCPStore(_HOST, port, size, is_master=False), rank, size, device_of(rank, device), timeout)


def device_of(rank: int, device: str) -> torch.device:
    """Each rank has a GPU of its own, counted on from the first; all share the CPU."""
    first = torch.device(device)
    return first if first.type == "cpu" else torch.device(first.type, (first.index or 0) + rank)
