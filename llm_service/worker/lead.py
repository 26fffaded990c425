"""Rank 0's side of a group's start: the store where it meets, and the other ranks of this host."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from datetime import timedelta

import msgspec
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not re-exported for checkers

from common.processes import ParentLink
from llm_service.settings import EngineSettings, RankPlace
from llm_service.worker.ranks import Ranks

_STORE_SECONDS = 300.0
_BACKLOG = 1024


def lead(settings: EngineSettings, arena_fd: int) -> Ranks:
    """Keeps the store, starts this host's other ranks, which inherit the row arena, and waits until all have joined.

    They are killed by the kernel when this process ends. Raises OSError where the store's address cannot be bound.
    """
    listening = socket.create_server(_address(settings), backlog=_BACKLOG)
    host, port = (settings.rendezvous.rpartition(":")[0] or "127.0.0.1"), listening.getsockname()[1]
    store = TCPStore(
        host,
        port,
        settings.tensor_parallel,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_STORE_SECONDS),
        master_listen_fd=listening.detach(),
    )
    first = rank_place(0, settings, host, port)
    children = [_start(msgspec.structs.replace(first, rank=rank), arena_fd) for rank in range(1, first.here)]
    return Ranks(first, store, children)


def rank_place(rank: int, settings: EngineSettings, host: str, port: int) -> RankPlace:
    """A rank's place in the group that the settings describe."""
    return RankPlace(
        rank=rank,
        size=settings.tensor_parallel,
        nodes=settings.nodes,
        host=host,
        port=port,
        timeout=settings.rank_timeout,
        device=settings.device,
        model=settings.model,
        threads=settings.threads,
    )


def _address(settings: EngineSettings) -> tuple[str, int]:
    """Where the store listens: on this host alone, unless other hosts take part."""
    if settings.nodes == 1:
        return "127.0.0.1", 0
    host, _, port = settings.rendezvous.rpartition(":")
    return host, int(port)


@dataclass(frozen=True, slots=True)
class LocalRank:
    """A rank that this process has started, and the link to it, which stays open as long as both live."""

    process: subprocess.Popen[bytes]
    link: ParentLink[None]

    @property
    def pid(self) -> int:
        """Its number."""
        return self.process.pid

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        return self.process.poll()


def _start(place: RankPlace, arena_fd: int) -> LocalRank:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "llm_service.worker", str(theirs.fileno()), str(arena_fd)]
        environ = {**os.environ, "TWINLENS_PARENT": str(os.getpid())}
        inherited = (theirs.fileno(), arena_fd)
        child = subprocess.Popen(command, pass_fds=inherited, stdin=subprocess.DEVNULL, env=environ)
    link: ParentLink[None] = ParentLink(ours.detach(), None)
    link.send(place)
    return LocalRank(child, link)
