"""`python -m benchmarks.transports`: rows from one process to another by each transport, in one run.

Both ends are the services' own code: the encoder's link over a store, in a process of its own, and the LLM service's
stream into a row arena. *memcpy* is numpy's copy between two warm buffers of this process; *plain gRPC* is a stream of
protobuf messages of 1 MiB, without checksum, check or landing, as a Python service would write it first.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import numpy as np

from common.arena import SharedBuffer
from common.grpc_calls import CallFrame
from common.wire import CHUNK_BYTES, DType, RowLayout
from encoder_service.engine.store import Entry, Store
from encoder_service.item import Grid, Header, Modality
from encoder_service.transports.base import Run
from encoder_service.transports.link import Link
from llm_service.encoders.breaker import Quarantine
from llm_service.encoders.peer import Asking, LinkSettings, Peer
from llm_service.request import Key, MediaItem
from twinlens.v1 import encoder_pb2, encoder_pb2_grpc, media_pb2

LAYOUT = RowLayout(levels=4, width=2048, dtype=DType.BFLOAT16)
"""Rows of 16 KiB: those of an 8 B Qwen3-VL with its three deepstack levels are twice as long."""

SIZES = (1 << 20, 8 << 20, 64 << 20)
DIGEST = "benchmark"
_PLAIN = "/benchmark.Plain/Rows"


class Sender(encoder_pb2_grpc.EncoderServiceServicer):
    """The encoder's link over one entry for each size; a key's first byte says which."""

    def __init__(self, link: Link, entries: list[Entry]) -> None:
        self._link = link
        self._entries = entries

    async def GetInfo(self, request: Any, context: Any) -> encoder_pb2.EncoderServiceGetInfoResponse:
        return encoder_pb2.EncoderServiceGetInfoResponse(digest=DIGEST, local_socket=self._link.local_socket)

    async def GetLoad(self, request: Any, context: Any) -> encoder_pb2.EncoderServiceGetLoadResponse:
        return encoder_pb2.EncoderServiceGetLoadResponse()

    async def Encode(self, request: encoder_pb2.EncodeRequest, context: Any) -> AsyncIterator[Any]:
        entry = self._entries[request.items[0].key[0]]
        yield encoder_pb2.EncodeResponse(header=_header(entry))
        transport = self._link.choose(request.accepts, request.host)
        async for run in transport.send(Run(0, entry.place, 0, entry.header.tokens), request.host):
            yield run if isinstance(run, bytes) else encoder_pb2.EncodeResponse(rows=run)
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


async def serve() -> None:
    """The sending process: prints its port, serves until its standard input ends."""
    buffer = SharedBuffer.create("benchmark", 2 * sum(SIZES))
    store = Store(buffer, LAYOUT.row_bytes)
    entries = []
    for number, size in enumerate(SIZES):
        tokens = size // LAYOUT.row_bytes
        place = await store.reserve(tokens)
        np.frombuffer(buffer.slice(place.span), "<u2")[:] = 0x3F80  # ones
        header = Header(bytes([number]) * 32, Modality.IMAGE, Grid(1, 2, 2 * tokens), tokens)
        entries.append(store.commit(place, header, ""))
    async with Link.open(store, LAYOUT, shared_memory=True, folder="", lease_seconds=60) as link:
        server = grpc.aio.server(interceptors=[CallFrame("")])
        encoder_pb2_grpc.add_EncoderServiceServicer_to_server(Sender(link, entries), server)

        async def plain(request: bytes, context: Any) -> AsyncIterator[encoder_pb2.EncodeRows]:
            data = buffer.slice(entries[request[0]].span)
            for start in range(0, len(data), CHUNK_BYTES):
                yield encoder_pb2.EncodeRows(first_row=start, data=bytes(data[start : start + CHUNK_BYTES]))

        handler = grpc.unary_stream_rpc_method_handler(
            plain, response_serializer=encoder_pb2.EncodeRows.SerializeToString
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("benchmark.Plain", {"Rows": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        print(port, flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await server.stop(None)


Way = Callable[[int], Awaitable[None]]


async def measure(address: str, runs: int) -> dict[str, list[float]]:
    """Seconds of each way for each size, the best of `runs`; the ways take turns."""
    landing = SharedBuffer.create("benchmark", max(SIZES))
    one, other = np.ones(max(SIZES), np.uint8), np.zeros(max(SIZES), np.uint8)
    channel = grpc.aio.insecure_channel(address, [("grpc.max_receive_message_length", 64 << 20)])
    rows = channel.unary_stream(_PLAIN, response_deserializer=encoder_pb2.EncodeRows.FromString)
    peers: dict[str, Peer] = {}
    watchers = []
    for name, shared in (("shared memory", True), ("gRPC chunks", False)):
        peer = peers[name] = Peer(
            address, "", LinkSettings(digest=DIGEST, layout=LAYOUT, shared_memory=shared), Quarantine()
        )
        changed = asyncio.Event()
        watchers.append(asyncio.create_task(peer.watch(changed)))
        await changed.wait()
        assert peer.usable
        assert (peer.region is not None) == shared

    async def memcpy(number: int) -> None:
        np.copyto(other[: SIZES[number]], one[: SIZES[number]])

    async def plain(number: int) -> None:
        at = 0
        async for message in rows(bytes([number])):
            landing.view[at : at + len(message.data)] = message.data
            at += len(message.data)

    def through(peer: Peer) -> Way:
        async def run(number: int) -> None:
            item = MediaItem(0, "image", Key(bytes([number]) * 32))
            async with peer.encode(item, Asking(request_id="", salt="", priority=0)) as stream:
                header = await stream.header()
                target = landing.view[: header.tokens * LAYOUT.row_bytes]
                landed = 0
                async for count, _ in stream.rows(target):
                    landed += count
                    if landed == header.tokens:
                        return  # every row is there; what the stream still says, nobody waits for

        return run

    ways: dict[str, Way] = {"memcpy": memcpy, "plain gRPC": plain}
    ways |= {name: through(peer) for name, peer in peers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(len(SIZES)):
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(runs + 1):
            for name, way in ways.items():
                started = time.perf_counter()
                await way(number)
                taken[name].append(time.perf_counter() - started)
        for name, values in taken.items():
            seconds[name].append(min(values[1:]))
    for watcher in watchers:
        watcher.cancel()
    for peer in peers.values():
        await peer.close()
    await channel.close()
    return seconds


async def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transports", description=__doc__)
    parser.add_argument("--runs", type=int, default=15, help="repetitions; the best is shown")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        await serve()
        return
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.transports", "--serve",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    port = int(await child.stdout.readline())
    seconds = await measure(f"127.0.0.1:{port}", given.runs)
    child.stdin.close()
    await child.wait()
    _print(seconds)


def _print(seconds: dict[str, list[float]]) -> None:
    print("| bytes | way | ms | GB/s | × memcpy | × plain gRPC |\n|---:|---|---:|---:|---:|---:|")
    for number, size in enumerate(SIZES):
        for name, values in seconds.items():
            taken = values[number]
            against = " | ".join(f"{seconds[other][number] / taken:.2f}" for other in ("memcpy", "plain gRPC"))
            print(f"| {size >> 20} MiB | {name} | {taken * 1e3:.2f} | {size / taken / 1e9:.2f} | {against} |")


if __name__ == "__main__":
    asyncio.run(main())
