"""Rows that ranks copy from an encoder's device memory into their mirrors of the row arena, by CUDA IPC.

The local socket's grant proves that the host is shared. That every rank can read the device is checked with the driver
first, and then by the first copy: a pool that cannot be opened is not tried again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable

from common.errors import DataLoss
from llm_service.encoders.transports.base import ArrivedRows, MirrorPlace
from llm_service.encoders.transports.shared_memory import SharedMemory
from llm_service.engine_client.mirrors import Mirrors
from llm_service.worker.messages import Pulled
from twinlens.v1 import encoder_pb2


class CudaIpc:
    """One encoder's pools, whose leases are on the board of its `memory`. Opened pools are closed by `close`, or when
    they are no longer listed. If a device broke a stream, the next one does without it."""

    number: encoder_pb2.Transport = encoder_pb2.TRANSPORT_CUDA_IPC
    splits = False
    after_break = False
    leased = True

    def __init__(self, memory: SharedMemory, mirrors: Mirrors) -> None:
        self._memory = memory
        self._mirrors = mirrors
        self._devices: dict[str, str] = {}
        self._opened: set[str] = set()
        self._refused: set[str] = set()

    @property
    def usable(self) -> bool:
        """Whether the memory is shared, and there is a device that every rank can read."""
        return self._memory.usable and bool(self.devices)

    async def on_info(self, info: encoder_pb2.EncoderServiceGetInfoResponse) -> None:
        """Pools are opened by the ranks, when first rows come from them."""
        self.listed(info.device_pools)

    def listed(self, pools: Iterable[encoder_pb2.DevicePool]) -> None:
        """The encoder lists its pools; others are gone."""
        self._devices = {pool.region: pool.gpu_uuid for pool in pools}
        self._refused &= self._devices.keys()
        self._let_go(self._opened - self._devices.keys())

    @property
    def devices(self) -> list[str]:
        """UUIDs of the devices that have pools of this encoder and that every rank reads."""
        refused = {self._devices[region] for region in self._refused if region in self._devices}
        return sorted({*self._devices.values()} & {*self._mirrors.reachable} - refused)

    def prove(self, host: encoder_pb2.HostProof) -> None:
        """States the devices; the grant is the memory's."""
        host.gpu_uuids.extend(self.devices)

    def takes(self, run: ArrivedRows) -> bool:
        """The run lies in device memory, and the ranks have a place for it."""
        handle = run.payload
        if not isinstance(handle, encoder_pb2.RowsHandle) or run.mirror is None:
            return False
        return self._memory.usable and handle.transport == self.number

    async def receive(self, run: ArrivedRows, target: memoryview) -> AsyncGenerator[int, None]:
        """One piece, of which nothing is written to `target`. The lease is checked after the copy, and released at the
        end in any case."""
        handle, place, memory, landed = run.payload, run.mirror, self._memory.region, False
        assert isinstance(handle, encoder_pb2.RowsHandle)
        assert place is not None
        assert memory is not None
        try:
            if handle.length != len(target):
                raise DataLoss("rows came in a wrong size")
            end = await self._pull(handle, place)
            memory.check_lease(handle)
            if end is Pulled.UNREACHABLE:
                self._refused.add(handle.region)
                raise DataLoss("an encoder's device memory cannot be read")
            if end is Pulled.DAMAGED:
                raise DataLoss("rows were damaged on the way, or hold numbers that are not finite")
            landed = True
            yield handle.length
        finally:
            if not landed:  # another way will bring them
                self._mirrors.invalidate(place.offset, len(target))
            memory.release(handle)

    async def _pull(self, handle: encoder_pb2.RowsHandle, place: MirrorPlace) -> Pulled:
        place.mirrored()
        self._opened.add(handle.region)
        return await self._mirrors.pull(
            region=handle.region,
            handle=handle.ipc_handle,
            source=handle.offset,
            target=place.offset,
            size=handle.length,
            row_sum=handle.row_sum,
        )

    def close(self) -> None:
        """The encoder is gone."""
        self._devices = {}
        self._let_go(set(self._opened))

    def _let_go(self, regions: set[str]) -> None:
        for region in regions:
            self._mirrors.unmap(region)
        self._opened -= regions
