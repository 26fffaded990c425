"""Both ends of `benchmarks.transports`, in separate processes: `python -m benchmarks.transport_ends END …`.

`send` and `read` are the services' own code: the encoder's transports over a store, the LLM service's stream into an
arena. `send-plain` and `read-plain` are a plain Python service: protobuf messages of 1 MiB, without checksum, check or
lease. A sender prints its port and serves until its standard input ends. A reader gets the number of a size on each
line of its standard input, and answers with the seconds until all bytes were in its landing buffer. `read-parts`
fetches parts of large sizes over each of its `--connections`. With `--nixl`, `send` has a NIXL agent too, and
`read-nixl` another. With a device, `send` also has the rows in a pool there; `read-device` has them copied to a mirror
there, and `read-pull` does the same and answers with the seconds of the copy and its checks alone.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import grpc
import numpy as np

from common.media.item import Grid, Header, Key, Modality
from common.nixl.agent import NixlAgent
from common.process.malloc import keep_large_blocks
from common.rows.wire import CHUNK_BYTES, DType, RowLayout
from common.rpc.bearer_tokens import AcceptedTokens
from common.rpc.calls import CallInterceptor
from common.shm.arena import SharedBuffer
from common.telemetry import log
from encoder_service.convert import read_stretch, write_nixl_agent
from encoder_service.engine.device_pool import DevicePools
from encoder_service.engine.embedding_store import EmbeddingStore, Entry
from encoder_service.transports.base import RowRun
from encoder_service.transports.transports import Transports
from llm_service.encoders.breaker import Quarantine
from llm_service.encoders.parallel_streams import open_parallel
from llm_service.encoders.replica import Replica
from llm_service.encoders.settings import EncodeParams, EncoderSettings
from llm_service.encoders.transports.base import MirrorPlace
from llm_service.encoders.transports.nixl_reader import NixlReader
from llm_service.request import MediaItem
from twinlens.v1 import encoder_pb2, encoder_pb2_grpc, media_pb2

LAYOUT = RowLayout(levels=4, width=2048, dtype=DType.BFLOAT16)
"""Rows of 16 KiB: those of an 8 B Qwen3-VL with its three deepstack levels are twice as long."""

SIZES = (1 << 20, 8 << 20, 64 << 20)
_DIGEST = "benchmark"
_PLAIN = "/benchmark.Plain/Rows"


class Sender(encoder_pb2_grpc.EncoderServiceServicer):
    """The encoder's transports over one entry for each size; a key's first byte says which."""

    def __init__(self, transports: Transports, entries: list[Entry]) -> None:
        self._transports = transports
        self._entries = entries

    async def GetInfo(self, request: Any, context: Any) -> encoder_pb2.EncoderServiceGetInfoResponse:
        pools = [
            encoder_pb2.DevicePool(region=pool.name, gpu_uuid=pool.device, bytes=pool.capacity)
            for pool in self._transports.pools
        ]
        return encoder_pb2.EncoderServiceGetInfoResponse(
            digest=_DIGEST,
            local_socket=self._transports.local_socket,
            device_pools=pools,
            nixl_agent=write_nixl_agent(self._transports.nixl_memory),
        )

    async def Release(self, request: encoder_pb2.ReleaseRequest, context: Any) -> encoder_pb2.ReleaseResponse:
        return encoder_pb2.ReleaseResponse(released=self._transports.release(request.leases))

    async def GetLoad(self, request: Any, context: Any) -> encoder_pb2.EncoderServiceGetLoadResponse:
        return encoder_pb2.EncoderServiceGetLoadResponse()

    async def Encode(self, request: encoder_pb2.EncodeRequest, context: Any) -> AsyncIterator[Any]:
        entry = self._entries[request.items[0].key[0]]
        yield encoder_pb2.EncodeResponse(header=_header(entry))
        run = RowRun(0, entry.allocation, *read_stretch(request, 0, entry.header.tokens))
        transport = self._transports.choose(request.accepts, request.host, run)
        async for chunk in transport.send(run, request.host):
            yield chunk if isinstance(chunk, bytes) else encoder_pb2.EncodeResponse(rows=chunk)
        yield encoder_pb2.EncodeResponse(done=encoder_pb2.EncodeDone())


def _header(entry: Entry) -> encoder_pb2.EncodeHeader:
    return encoder_pb2.EncodeHeader(
        key=entry.header.key,
        modality=media_pb2.MODALITY_IMAGE,
        grid=media_pb2.Grid(t=1, h=2, w=2 * entry.header.tokens),
        tokens=entry.header.tokens,
        width=LAYOUT.width,
        levels=LAYOUT.levels,
        dtype=media_pb2.DATA_TYPE_BFLOAT16,
    )


async def send(device: str, nixl: str) -> None:
    """The encoder's end; `nixl` is the back end of its agent, empty for none."""
    keep_large_blocks()
    buffer = SharedBuffer.create("benchmark", 2 * sum(SIZES))
    store = EmbeddingStore(buffer, LAYOUT.row_bytes)
    entries = []
    for number, size in enumerate(SIZES):
        tokens = size // LAYOUT.row_bytes
        allocation = await store.allocate(tokens)
        np.frombuffer(store.buffer.slice(allocation.span), "<u2")[:] = 0x3F80  # ones
        header = Header(bytes([number]) * 32, Modality.IMAGE, Grid(1, 2, 2 * tokens), tokens)
        entries.append(store.commit(allocation, header, ""))
    pools = DevicePools(LAYOUT.row_bytes) if device else None
    if pools is not None:
        from benchmarks.transport_devices import fill

        fill(pools, device, store, entries)
    async with AsyncExitStack() as opened:
        agent = NixlAgent(buffer, nixl) if nixl else None
        if agent is not None:
            opened.push_async_callback(agent.stop)
            await agent.start()
        given = Transports.open(store, LAYOUT, shared_memory=True, folder="", lease_seconds=60, pools=pools, nixl=agent)
        transports = await opened.enter_async_context(given)
        server = grpc.aio.server(interceptors=[CallInterceptor(AcceptedTokens())])
        sender = Sender(transports, entries)  # type: ignore[abstract]  # nothing else is asked of it
        encoder_pb2_grpc.add_EncoderServiceServicer_to_server(sender, server)
        await _serve(server)


async def send_plain() -> None:
    """The same bytes from a generator of protobuf messages."""
    data = np.full(max(SIZES) // 2, 0x3F80, "<u2").data.cast("B")

    async def rows(request: bytes, context: Any) -> AsyncIterator[encoder_pb2.EncodeRows]:
        for start in range(0, SIZES[request[0]], CHUNK_BYTES):
            yield encoder_pb2.EncodeRows(first_row=start, data=bytes(data[start : start + CHUNK_BYTES]))

    handler: Any = grpc.unary_stream_rpc_method_handler(
        rows, response_serializer=encoder_pb2.EncodeRows.SerializeToString
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("benchmark.Plain", {"Rows": handler}),))
    await _serve(server)


async def _serve(server: grpc.aio.Server) -> None:
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


async def read(way: encoder_pb2.Transport, given: argparse.Namespace, *, pull_alone: bool = False) -> None:
    """The LLM service's end, of which rows come in this way; with a device, a rank's mirror is in this process too."""
    keep_large_blocks()
    landing, mirrors, nixl = SharedBuffer.create("benchmark", max(SIZES)), None, None
    device = given.device if way == encoder_pb2.TRANSPORT_CUDA_IPC else ""
    if device:
        from benchmarks.transport_devices import LocalMirrors

        mirrors = LocalMirrors(device, max(SIZES), LAYOUT)
    if way == encoder_pb2.TRANSPORT_NIXL:
        nixl = NixlReader(given.nixl, 64 << 20, LAYOUT.dtype)
        await nixl.start()
    settings = EncoderSettings(
        digest=_DIGEST,
        layout=LAYOUT,
        merge=2,
        shared_memory=way in (encoder_pb2.TRANSPORT_SHARED_MEMORY, encoder_pb2.TRANSPORT_CUDA_IPC),
        connections=given.connections,
        mirrors=mirrors,
        nixl=nixl,
    )
    replica, changed = Replica(given.address, "", settings, Quarantine()), asyncio.Event()
    watcher = asyncio.create_task(replica.watch(changed))
    await changed.wait()
    assert replica.usable
    assert replica.transports[0] == way, "rows would come in another way"

    async def run(number: int) -> float | None:
        item = MediaItem(Modality.IMAGE, Key(bytes([number]) * 32))
        params = EncodeParams(request_id="", salt="", priority=0)
        with ExitStack() as first, ExitStack() as others:
            stream = first.enter_context(replica.encode(await replica.prepare(item, params)))
            header = await stream.header()
            parts = await open_parallel(replica, item, params, header, LAYOUT.row_bytes, others)
            if parts is not None:
                first.close()
            landed = 0
            target = landing.view[: header.tokens * LAYOUT.row_bytes]
            async for count, transport in (parts or stream).rows(target, MirrorPlace(0, lambda: None)):
                assert transport == way
                landed += count
                if landed == header.tokens:
                    break  # every row is there; what the stream still says, nobody waits for
        return mirrors.seconds if mirrors is not None and pull_alone else None

    await _answer(run)
    watcher.cancel()
    await replica.close()
    if nixl is not None:
        await nixl.stop()


async def read_plain(address: str) -> None:
    """Messages, one after the other, into a buffer."""
    landing = SharedBuffer.create("benchmark", max(SIZES)).view
    async with grpc.aio.insecure_channel(address, [("grpc.max_receive_message_length", 64 << 20)]) as channel:
        rows: Any = channel.unary_stream(_PLAIN, response_deserializer=encoder_pb2.EncodeRows.FromString)

        async def run(number: int) -> float | None:
            at = 0
            async for message in rows(bytes([number])):
                data = message.data  # protobuf makes a copy each time it is asked
                landing[at : at + len(data)] = data
                at += len(data)
            return None

        await _answer(run)


async def _answer(run: Callable[[int], Awaitable[float | None]]) -> None:
    """Does what is asked on standard input until that ends; the time is taken here, unless `run` gives one."""
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        started = time.perf_counter()
        given = await run(int(line))
        print(time.perf_counter() - started if given is None else given, flush=True)


def main() -> None:
    """Runs one end."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transport_ends", description=__doc__)
    parser.add_argument(
        "end",
        choices=(
            "send",
            "send-plain",
            "read-shared",
            "read-chunks",
            "read-parts",
            "read-nixl",
            "read-plain",
            "read-device",
            "read-pull",
        ),
    )
    parser.add_argument("address", nargs="?", default="", help="address of the sender, for a reader")
    parser.add_argument("--device", default="", help="device of pools and mirrors")
    parser.add_argument("--connections", type=int, default=1, help="connections of read-parts")
    parser.add_argument("--nixl", default="", help="back end of NIXL agents")
    given = parser.parse_args()
    log.configure("error", service="benchmark")
    ends: dict[str, Callable[[], Any]] = {
        "send": lambda: send(given.device, given.nixl),
        "send-plain": send_plain,
        "read-shared": lambda: read(encoder_pb2.TRANSPORT_SHARED_MEMORY, given),
        "read-chunks": lambda: read(encoder_pb2.TRANSPORT_INLINE, given),
        "read-parts": lambda: read(encoder_pb2.TRANSPORT_INLINE, given),
        "read-nixl": lambda: read(encoder_pb2.TRANSPORT_NIXL, given),
        "read-device": lambda: read(encoder_pb2.TRANSPORT_CUDA_IPC, given),
        "read-pull": lambda: read(encoder_pb2.TRANSPORT_CUDA_IPC, given, pull_alone=True),
        "read-plain": lambda: read_plain(given.address),
    }
    asyncio.run(ends[given.end]())


if __name__ == "__main__":
    main()
