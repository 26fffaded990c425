"""Many callers and many pictures: the work that is done, the memory that is held, and what is left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import google_crc32c
import grpc

from tests import pictures
from tests.launch import Service, encoder_server
from tests.rpc.encoder_client import Client, image
from tests.rpc.pairs import ENCODER_FLAGS
from tests.waiting import until
from twinlens.v1 import encoder_pb2, encoder_pb2_grpc


def resident(service: Service) -> int:
    """Bytes of memory that the service and all its processes have, shared memory counted once."""
    total = 0
    for pid in (service.pid, *service.descendants()):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) << 10
    return total


async def _ask_all(address: str, requests: int, request: encoder_pb2.EncodeRequest) -> list[int | grpc.StatusCode]:
    """A checksum of the rows that each of many calls at once gets, or its status."""

    async def ask(stub: encoder_pb2_grpc.EncoderServiceStub) -> int | grpc.StatusCode:
        crc = 0
        try:
            async for event in stub.Encode(request, timeout=120):
                assert event.WhichOneof("event") != "error", event
                if event.WhichOneof("event") == "rows":
                    crc = google_crc32c.extend(crc, event.rows.data)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return crc

    async with grpc.aio.insecure_channel(address) as channel:
        stub = encoder_pb2_grpc.EncoderServiceStub(channel)
        return await asyncio.gather(*(ask(stub) for _ in range(requests)))


def test_a_thousand_calls_for_one_new_picture_are_one_pass_of_the_tower(checkpoints: Callable[..., Path]) -> None:
    with encoder_server(checkpoints("qwen3_vl"), **ENCODER_FLAGS) as service, Client(service) as client:
        data = pictures.encoded(pictures.noise(96, 64, 61_000))
        answers = asyncio.run(_ask_all(service.address, 1000, encoder_pb2.EncodeRequest(items=[image(data)])))
        assert len(set(answers)) == 1, set(answers)
        assert isinstance(answers[0], int)
        load = client.load()
        assert (load.vit_calls, load.encoded_items, load.store_misses, load.store_hits) == (1, 1, 1, 999)
        until(lambda: client.load().open_streams == 0, "no stream is left")


def test_three_hundred_pictures_go_through_a_store_that_holds_fifty(checkpoints: Callable[..., Path]) -> None:
    rows = 8 * 8  # a 256 × 256 picture: 16 × 16 patches, merged two by two
    capacity = 50 * rows * 3 * 64 * 4
    with (
        encoder_server(checkpoints("qwen3_vl"), **{**ENCODER_FLAGS, "store_bytes": capacity}) as service,
        Client(service) as client,
    ):
        with ThreadPoolExecutor(8) as threads:  # so that every process has what it keeps for good
            warm = (pictures.encoded(pictures.noise(256, 256, seed)) for seed in range(61_900, 61_940))
            list(threads.map(lambda data: client.one(image(data)), warm))
        client.stub.FlushCache(encoder_pb2.EncoderServiceFlushCacheRequest())
        before, most, over = resident(service), 0, threading.Event()

        def watch() -> None:
            nonlocal most
            while not over.wait(0.02):
                most = max(most, client.load().store_bytes)

        watching = threading.Thread(target=watch)
        watching.start()
        with ThreadPoolExecutor(8) as threads:
            files = threads.map(lambda seed: pictures.encoded(pictures.noise(256, 256, seed)), range(62_000, 62_300))
            found = list(threads.map(lambda data: client.one(image(data)), files))
        over.set()
        watching.join()

        assert [each.error for each in found] == [None] * 300
        assert {len(each.rows) for each in found} == {rows}
        load = client.load()
        assert 0 < most <= load.store_capacity_bytes <= capacity
        assert 45 <= load.store_entries <= 50
        flushed = client.stub.FlushCache(encoder_pb2.EncoderServiceFlushCacheRequest())
        assert flushed.entries == load.store_entries
        assert client.load().store_bytes == 0
        until(lambda: resident(service) < before + (32 << 20), "memory is back where it was")
