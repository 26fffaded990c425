"""All transports of this encoder: what is offered, and what is held for readers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path

from common.errors import Exhausted, Precondition
from common.nixl.agent import NixlAgent
from common.nixl.messages import AgentMemory
from common.rows.wire import RowLayout
from common.shm.lease_board import LeaseBoard
from encoder_service.engine.device_pool import DevicePool, DevicePools
from encoder_service.engine.embedding_store import EmbeddingStore
from encoder_service.engine.leases import Leases
from encoder_service.transports.base import RowRun, Sent, Transport
from encoder_service.transports.cuda_ipc import CudaIpc
from encoder_service.transports.inline import Inline
from encoder_service.transports.local_socket import LocalSocket
from encoder_service.transports.nixl import Nixl
from encoder_service.transports.shared_memory import SharedMemory
from twinlens.v1 import encoder_pb2

_SLOTS = 4096


class Transports:
    """The transports of one encoder, the shortest way first."""

    def __init__(
        self,
        transports: Sequence[Transport],
        sent: Sent,
        leases: Leases | None,
        local: LocalSocket | None,
        pools: DevicePools | None = None,
        nixl: NixlAgent | None = None,
    ) -> None:
        self.sent = sent
        self._pools = pools
        self._transports = tuple(transports)
        self._leases = leases
        self._local = local
        self._nixl = nixl
        self._boot_id = _boot_id()

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        store: EmbeddingStore,
        layout: RowLayout,
        *,
        shared_memory: bool,
        folder: str,
        lease_seconds: float,
        pools: DevicePools | None = None,
        nixl: NixlAgent | None = None,
        slots: int = _SLOTS,
    ) -> AsyncIterator[Transports]:
        """The transports, for the duration of the context. `pools` are the workers' pools, if any, and `nixl` the agent
        of the store's memory, if any. At most `slots` leases exist at once; beyond that, rows go inline to callers who
        accept it.

        Raises OSError if `folder` cannot hold a socket.
        """
        sent = Sent()
        ways: list[Transport] = [Inline(store, layout, sent)]
        if not shared_memory and nixl is None:
            yield cls(ways, sent, None, None)
            return
        with closing(LeaseBoard(slots)) as board:
            leases, local = Leases(store, board, lease_seconds), None
            if nixl is not None:
                ways.insert(0, Nixl(store, layout, leases, nixl, sent))
            async with AsyncExitStack() as opened:
                if shared_memory:
                    local = LocalSocket(folder, store.buffer, board.buffer, leases)
                    local.start()
                    opened.push_async_callback(local.stop)
                    ways.insert(0, SharedMemory(layout, leases, local, sent))
                    if pools is not None:
                        pools.on_lost = leases.lose
                        ways.insert(0, CudaIpc(layout, leases, local, pools, sent))
                yield cls(ways, sent, leases, local, pools, nixl)
            leases.check_idle()

    @property
    def numbers(self) -> list[encoder_pb2.Transport]:
        """The transports that are offered."""
        return [transport.number for transport in self._transports]

    @property
    def leases(self) -> int:
        """Leases that are held."""
        return len(self._leases) if self._leases is not None else 0

    @property
    def local_socket(self) -> encoder_pb2.LocalSocket | None:
        """Where the store's memory is handed over; None if it is not."""
        return (
            None if self._local is None else encoder_pb2.LocalSocket(name=self._local.name, secret=self._local.secret)
        )

    @property
    def pools(self) -> Sequence[DevicePool]:
        """Device memory of workers that are alive."""
        return () if self._pools is None else self._pools.alive

    @property
    def nixl_memory(self) -> AgentMemory | None:
        """The store's memory for callers' NIXL agents; None if it is not available, or not now."""
        return None if self._nixl is None else self._nixl.memory

    def check(self, accepts: Iterable[int], host: encoder_pb2.HostProof) -> None:
        """Raises Precondition if a caller has proved none of the transports that it accepts. Room is checked later,
        when there are rows to send."""
        self._ways(accepts, host, None)

    def choose(self, accepts: Iterable[int], host: encoder_pb2.HostProof, run: RowRun) -> Transport:
        """The shortest transport that the caller accepts and has proved, that fits this run, and has room. Raises
        Precondition if there is none, and Exhausted if only room is missing."""
        for transport in self._ways(accepts, host, run):
            if transport.has_room(run):
                return transport
        raise Exhausted("every lease on rows is in use", reason="LEASES_FULL")

    def _ways(self, accepts: Iterable[int], host: encoder_pb2.HostProof, run: RowRun | None) -> list[Transport]:
        """At least one."""
        wanted = set(accepts) - {encoder_pb2.TRANSPORT_UNSPECIFIED} or {encoder_pb2.TRANSPORT_INLINE}
        if host.boot_id not in ("", self._boot_id):
            host = encoder_pb2.HostProof(nixl_agent=host.nixl_agent)
        proved = [each for each in self._transports if each.number in wanted and each.proved(host)]
        found = proved if run is None else [each for each in proved if each.takes(run, host)]
        if not found:
            raise Precondition(
                "there is no way to transfer rows that the caller accepts",
                reason="NO_COMMON_TRANSPORT",
                field="accepts",
            )
        return found

    def release(self, names: Iterable[str]) -> int:
        """Ends leases by their names; how many were still held."""
        return 0 if self._leases is None else sum(map(self._leases.release, names))


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""
