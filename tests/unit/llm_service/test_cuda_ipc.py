"""The reader's end of rows in device memory: what is accepted, when rows count, and what is let go."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from common.errors import LEASE_EXPIRED, DataLoss, Unavailable
from common.rows.wire import DType, RowLayout
from llm_service.encoders.breaker import Quarantine
from llm_service.encoders.replica import Replica
from llm_service.encoders.settings import EncodeParams, EncoderSettings
from llm_service.encoders.transports.base import ArrivedRows, MirrorPlace
from llm_service.encoders.transports.cuda_ipc import CudaIpc
from llm_service.encoders.transports.shared_memory import SharedMemory
from llm_service.engine.messages import PullEnded
from llm_service.engine_client.mirrors import Mirrors
from llm_service.worker.messages import InvalidateRows, MirrorOrder, Pulled, PullRows, UnmapPool
from twinlens.v1 import encoder_pb2

PLACE = 4096


@dataclass
class Memory:
    """The local socket's side: whether leases stand, and which were given back."""

    stands: bool = True
    released: list[int] = field(default_factory=list)

    @property
    def region(self) -> Memory:
        return self

    @property
    def usable(self) -> bool:
        return True

    def check_lease(self, handle: encoder_pb2.RowsHandle) -> None:
        if not self.stands:
            raise Unavailable("it has ended", reason=LEASE_EXPIRED)

    def release(self, handle: encoder_pb2.RowsHandle) -> None:
        self.released.append(handle.number)


@dataclass
class Bench:
    end: Pulled | None = Pulled.LANDED
    orders: list[MirrorOrder] = field(default_factory=list)
    marked: int = 0

    def __post_init__(self) -> None:
        self.memory = Memory()
        self.mirrors = Mirrors(self._take)
        self.mirrors.opened(["GPU-0", "GPU-1"])
        self.ipc = CudaIpc(self.memory, self.mirrors)  # type: ignore[arg-type]
        self.listed("a", "b")

    def listed(self, *regions: str) -> None:
        self.ipc.listed([encoder_pb2.DevicePool(region=each, gpu_uuid="GPU-0", bytes=1 << 20) for each in regions])

    def _take(self, order: MirrorOrder) -> None:
        self.orders.append(order)
        if isinstance(order, PullRows):
            assert self.marked, "rows may land before anybody knows that they may"
            if self.end is not None:
                asyncio.get_running_loop().call_soon(self.mirrors.ended, PullEnded(order.id, self.end))

    def _mark(self) -> None:
        self.marked += 1

    def run(self, **changes: object) -> ArrivedRows:
        given = {"transport": self.ipc.number, "region": "a", "offset": 64, "length": 32, "ipc_handle": b"h"}
        handle = encoder_pb2.RowsHandle(**{**given, "slot": 1, "number": 7, "row_sum": 9, **changes})
        return ArrivedRows(0, 4, handle, MirrorPlace(PLACE, self._mark))

    async def read(self, run: ArrivedRows | None = None) -> list[int]:
        async with aclosing(self.ipc.receive(run or self.run(), memoryview(bytearray(32)))) as pieces:
            return [piece async for piece in pieces]


async def test_rows_count_once_every_rank_has_them_and_the_lease_still_stands() -> None:
    bench = Bench()
    assert bench.ipc.takes(bench.run())
    assert await bench.read() == [32]
    (pull,) = bench.orders
    assert pull == PullRows(id=1, region="a", handle=b"h", source=64, target=PLACE, size=32, row_sum=9)
    assert bench.memory.released == [7]


@pytest.mark.parametrize("end", [Pulled.DAMAGED, Pulled.UNREACHABLE])
async def test_rows_that_a_rank_does_not_have_count_nowhere(end: Pulled) -> None:
    bench = Bench(end)
    with pytest.raises(DataLoss):
        await bench.read()
    assert bench.orders[1:] == [InvalidateRows(PLACE, 32)]
    assert bench.memory.released == [7]
    assert bench.ipc.devices == ([] if end is Pulled.UNREACHABLE else ["GPU-0"])


@pytest.mark.parametrize("end", list(Pulled))
async def test_a_lease_that_ended_meanwhile_makes_the_copy_worthless_and_blames_no_device(end: Pulled) -> None:
    bench = Bench(end)
    bench.memory.stands = False
    with pytest.raises(Unavailable) as late:
        await bench.read()
    assert late.value.reason == LEASE_EXPIRED
    assert bench.orders[1:] == [InvalidateRows(PLACE, 32)]
    assert bench.ipc.devices == ["GPU-0"]


async def test_who_is_cancelled_waits_for_the_ranks_and_takes_nothing() -> None:
    bench = Bench(None)
    task = asyncio.create_task(bench.read())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert bench.memory.released == []
    bench.mirrors.ended(PullEnded(1, Pulled.LANDED))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.orders[1:] == [InvalidateRows(PLACE, 32)]
    assert bench.memory.released == [7]


async def test_without_an_engine_there_is_nothing_to_wait_for() -> None:
    bench = Bench()
    bench.mirrors.lost()
    with pytest.raises(DataLoss):
        await bench.read()
    assert bench.orders == []
    assert bench.ipc.devices == []


@pytest.mark.parametrize("length", [64, 0, -32, 1 << 40])
async def test_a_wrong_length_is_refused_before_anything_is_copied_and_strikes_no_other_s_rows(length: int) -> None:
    bench = Bench()
    with pytest.raises(DataLoss):
        await bench.read(bench.run(length=length))
    assert bench.orders == [InvalidateRows(PLACE, 32)]
    assert bench.memory.released == [7]


async def test_pools_that_are_gone_are_let_go_and_so_is_all_at_the_encoder_s_end() -> None:
    bench = Bench()
    await bench.read()
    await bench.read(bench.run(region="b"))
    del bench.orders[:]
    bench.listed("b", "c")
    assert bench.orders == [UnmapPool("a")]
    bench.listed("b", "c")
    bench.ipc.close()
    assert bench.orders == [UnmapPool("a"), UnmapPool("b")]
    assert bench.ipc.devices == []


async def test_a_pool_that_cannot_be_read_is_not_asked_for_until_another_takes_its_place() -> None:
    bench = Bench(Pulled.UNREACHABLE)
    with pytest.raises(DataLoss):
        await bench.read()
    bench.listed("a", "b")
    assert bench.ipc.devices == []
    bench.listed("c")
    assert bench.ipc.devices == ["GPU-0"]
    host = encoder_pb2.HostProof()
    bench.ipc.prove(host)
    assert list(host.gpu_uuids) == ["GPU-0"]


async def test_only_handles_of_this_kind_are_taken_and_only_where_there_is_a_place() -> None:
    bench = Bench()
    assert not bench.ipc.takes(bench.run(transport=encoder_pb2.TRANSPORT_SHARED_MEMORY))
    run = bench.run()
    assert not bench.ipc.takes(ArrivedRows(run.first, run.count, run.payload))


@pytest.mark.parametrize(
    ("pools", "asking", "expected"),
    [
        (1, {}, ["CudaIpc", "SharedMemory", "Inline"]),
        (1, {"attempt": 1}, ["CudaIpc", "SharedMemory", "Inline"]),
        (1, {"attempt": 1, "broke": True}, ["SharedMemory", "Inline"]),
        (0, {}, ["SharedMemory", "Inline"]),
    ],
)
async def test_what_broke_once_comes_by_way_of_the_host(
    pools: int, asking: dict[str, int], expected: list[str]
) -> None:
    layout, mirrors = RowLayout(levels=1, width=16, dtype=DType.FLOAT32), Mirrors(lambda _: None)
    mirrors.opened(["GPU-0"])
    settings = EncoderSettings(digest="", layout=layout, merge=2, mirrors=mirrors, part_bytes=1, connections=2)
    replica = Replica("127.0.0.1:1", "", settings, Quarantine())
    asked = EncodeParams(request_id="", salt="", priority=0, **asking)
    pool = encoder_pb2.DevicePool(region="a", gpu_uuid="GPU-0", bytes=1 << 20)
    for transport in replica._transports:
        await transport.on_info(encoder_pb2.EncoderServiceGetInfoResponse(device_pools=[pool] * pools))
    assert [type(each).__name__ for each in replica.ways(asked)] == ["Inline"]
    assert replica.parts(2) == 2
    (memory,) = (each for each in replica._transports if isinstance(each, SharedMemory))
    memory.region = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
    assert [type(each).__name__ for each in replica.ways(asked)] == expected
    assert replica.parts(2) == 1
    await replica.close()
    assert [type(each).__name__ for each in replica.ways(asked)] == ["Inline"]
