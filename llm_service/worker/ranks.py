"""The ranks of a tensor-parallel group: how they meet, how step plans reach them, and how a lost rank is noticed.

Rank 0 is in the engine process and starts the others of its host; `worker/node` starts those of other hosts.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # public, not re-exported for checkers

from common.process.children import ChildProcess
from common.process.parent_link import ParentLink
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.plan import RowSlice
from llm_service.settings import EngineSettings, RankPlace
from llm_service.worker.heartbeat import Heartbeat, Process
from llm_service.worker.row_arena import RowArena

_LOAD_SECONDS = 1800.0
"""Longest that ranks wait for each other: loading takes as long as it takes, and a lost rank is noticed by its beat."""

_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True)
class _Hosts:
    """Groups that rows travel over: the first ranks of all hosts, and the ranks of this one."""

    leaders: dist.ProcessGroup
    local: dist.ProcessGroup
    is_leader: bool
    is_first: bool


class Ranks:
    """This process's membership of a group; `group` is what layers use to sum, by NCCL on GPUs and Gloo on CPUs.

    Plans travel as msgpack over Gloo, in a group of their own. Every rank sets a beat in the store and watches the
    others' (`Heartbeat`). A rank that is frozen, dead or cut off ends the group, even if the others are waiting for
    ranks to join, or in a captured collective.
    """

    def __init__(self, place: RankPlace, store: Store, children: Sequence[Process] = ()) -> None:
        """Waits until all ranks have joined. `children` are those that this process has started. Raises
        PlaceTakenError."""
        device = device_of(place)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        interface = interface_towards(place.host, place.port)
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, interface)
        Heartbeat(place, children).start()
        limit = timedelta(seconds=_LOAD_SECONDS)
        dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size, timeout=limit)
        if device.type == "cuda":
            layers = dist.new_group(backend="nccl", timeout=limit, device_id=device)
        else:
            layers = dist.new_group(backend="gloo", timeout=limit)
        self.group = TensorGroup(place.rank, place.size, layers)
        self._hosts = _hosts(place) if place.nodes > 1 else None

    def wait_for_all(self) -> None:
        """Returns when every rank has called it, after loading, which may take long."""
        dist.barrier()

    def tell(self, message: bytes) -> None:
        """Rank 0: sends a message to all others. Raises RuntimeError if one is gone."""
        dist.broadcast(torch.tensor([len(message)]), 0)
        if message:
            dist.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), 0)

    def hear(self) -> bytes:
        """Other ranks: waits for rank 0's next message, which may be empty. Raises RuntimeError if it is gone."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, 0)
        message = torch.empty(int(length), dtype=torch.uint8)
        if len(message):
            dist.broadcast(message, 0)
        return message.numpy().tobytes()

    def broadcast_rows(self, rows: list[RowSlice], arena: RowArena) -> None:
        """Every rank: brings the rows that a plan needs to the hosts that do not have them. Nothing on one host.

        The arena is shared memory, so the first host's ranks have the rows. Other hosts have an arena of their own, at
        the same offsets: rank 0 sends to the first rank of each, once for the host and not for each rank.
        """
        if self._hosts is None or not rows:
            return
        if self._hosts.is_leader:
            packed = torch.cat([arena.bytes_of(piece) for piece in rows])
            dist.broadcast(packed, 0, group=self._hosts.leaders)
            if not self._hosts.is_first:
                sizes = [piece.count * arena.row_bytes for piece in rows]
                for piece, part in zip(rows, packed.split(sizes), strict=True):
                    arena.bytes_of(piece).copy_(part)
        if not self._hosts.is_first:
            dist.barrier(group=self._hosts.local)


def _hosts(place: RankPlace) -> _Hosts:
    """Makes the groups; every rank makes all of them, in the same order."""
    here = place.ranks_per_host
    firsts = list(range(0, place.size, here))
    leaders = dist.new_group(firsts, backend="gloo")
    locals_ = [dist.new_group(list(range(first, first + here)), backend="gloo") for first in firsts]
    return _Hosts(leaders, locals_[place.rank // here], place.rank % here == 0, place.is_on_first_host)


def join(place: RankPlace) -> Ranks:
    """Joins the group as a rank other than the first, as soon as its store is up. Raises PlaceTakenError if that store
    still belongs to a group that has lost this rank without noticing."""
    limit = timedelta(seconds=_LOAD_SECONDS)
    return Ranks(place, TCPStore(place.host, place.port, place.size, is_master=False, timeout=limit))


def device_of(place: RankPlace) -> torch.device:
    """Each rank of a host has a GPU of its own, counted on from the first; all share the CPU."""
    return torch.device(place.device_name)


def interface_towards(host: str, port: int) -> str:
    """The name of the interface that packets to a host leave by, such as eth0; lo for this host.

    Raises OSError if there is no route.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # nothing is sent: the kernel looks the route up
        own = str(probe.getsockname()[0])
    for _, name in socket.if_nameindex():
        if _address(name) == own:
            return name
    return "lo" if own in ("127.0.0.1", "::1") else _first_but_lo()


def _address(interface: str) -> str:
    """An interface's IPv4 address; empty if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            found = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(found[20:24])


def _first_but_lo() -> str:
    return next((name for _, name in socket.if_nameindex() if name != "lo"), "lo")


_STORE_SECONDS = 300.0
_BACKLOG = 1024


def lead(settings: EngineSettings, arena_fd: int) -> Ranks:
    """Runs the store, starts this host's other ranks, which inherit shared memory, and waits until all have joined.

    The kernel kills them when this process ends. Raises OSError if the store's address cannot be bound.
    """
    listening = socket.create_server(_meeting_place(settings), backlog=_BACKLOG)
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
    fds = [arena_fd, *([settings.kv_host_fd] if settings.kv_host_fd else [])]
    children = [_start(msgspec.structs.replace(first, rank=rank), fds) for rank in range(1, first.ranks_per_host)]
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


def _meeting_place(settings: EngineSettings) -> tuple[str, int]:
    """Where the store listens: only on this host, unless other hosts take part."""
    if settings.nodes == 1:
        return "127.0.0.1", 0
    host, _, port = settings.rendezvous.rpartition(":")
    return host, int(port)


@dataclass(frozen=True, slots=True)
class LocalRank:
    """A rank that this process has started, and the link to it, which is open as long as both live."""

    process: subprocess.Popen[bytes]
    link: ParentLink[None]

    @property
    def pid(self) -> int:
        """Its number."""
        return self.process.pid

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        return self.process.poll()


def _start(place: RankPlace, fds: Sequence[int]) -> LocalRank:
    """`fds` are inherited; the first one is that of the row arena."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "llm_service.worker", str(theirs.fileno()), str(fds[0])]
        environ = {**os.environ, "TWINLENS_PARENT": str(os.getpid())}
        inherited = (theirs.fileno(), *fds)
        child = ChildProcess.popen(
            command, stdin=subprocess.DEVNULL, stderr=sys.stderr.fileno(), pass_fds=inherited, env=environ
        )
    link: ParentLink[None] = ParentLink(ours.detach(), None)
    link.send(place)
    return LocalRank(child, link)
