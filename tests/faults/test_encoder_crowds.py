"""Many callers and many pictures: the work that is done, the memory that is held, and what is left."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import google_crc32c
import grpc
import pytest

from tests import pictures
from tests.launch import Service, encoder_server
from tests.rpc.encoder_client import Client, image
from tests.rpc.pairs import ENCODER_FLAGS, answer, asked, pair
from tests.waiting import until
from twinlens import image as picture_of
from twinlens import user
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
            async for event in stub.Encode(request, timeout=600):
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


ROUND = 50
"""Pictures of a round: as many as the store holds."""
SIDE = 256
ROWS = (SIDE // 32) ** 2
"""A picture's rows: 16 × 16 patches, merged two by two."""
ROW_BYTES = 3 * 64 * 4


@pytest.mark.soak
def test_three_hundred_pictures_go_through_a_store_that_holds_fifty(checkpoints: Callable[..., Path]) -> None:
    capacity = ROUND * ROWS * ROW_BYTES
    with (
        encoder_server(checkpoints("qwen3_vl"), **{**ENCODER_FLAGS, "store_bytes": capacity}) as service,
        Client(service) as client,
        watched(client) as most,
    ):
        sizes = []
        for number in range(6):
            encode_round(client, 62_000 + number * ROUND)
            load = client.load()
            assert 45 <= load.store_entries <= 50
            flushed = client.stub.FlushCache(encoder_pb2.EncoderServiceFlushCacheRequest())
            assert flushed.entries == load.store_entries
            assert client.load().store_bytes == 0
            assert pages(service, "twinlens-store") == 0
            sizes.append(resident(service))
        assert load.encoded_items == 6 * ROUND
    assert 0 < max(most) <= capacity
    # What piled up would pile up in every round: files of 10 MB, pixels of 10 MB, or rows of 2.5 MB. What allocators
    # keep for next time does not.
    growth = [after - before for before, after in itertools.pairwise(sizes)]
    assert min(growth) < ROUND * ROWS * ROW_BYTES // 2, growth


def encode_round(client: Client, seed: int) -> None:
    """Eight callers at a time ask for the rows of a round's pictures."""
    with ThreadPoolExecutor(8) as threads:
        files = threads.map(lambda each: pictures.encoded(pictures.noise(SIDE, SIDE, each)), range(seed, seed + ROUND))
        found = list(threads.map(lambda data: client.one(image(data)), files))
    assert [each.error for each in found] == [None] * ROUND
    assert {len(each.rows) for each in found} == {ROWS}


@contextmanager
def watched(client: Client) -> Iterator[list[int]]:
    """Every so often, the bytes in the store."""
    sizes, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            sizes.append(client.load().store_bytes)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield sizes
    finally:
        over.set()
        watching.join()


def pages(service: Service, name: str) -> int:
    """Bytes of memory behind a shared arena of the service."""
    links = Path(f"/proc/{service.pid}/fd").iterdir()
    arena = next(link for link in links if f"memfd:{name}" in str(link.readlink()))
    return arena.stat().st_blocks * 512


def test_requests_of_many_pictures_are_all_answered_by_an_encoder_with_few_places(
    checkpoints: Callable[..., Path],
) -> None:
    """Fewer than one request has pictures."""
    requests, pictures_each = 6, 4
    flags = {"max_queued_items": pictures_each - 1}
    with pair(checkpoints("qwen3_vl"), encoder_flags=flags, encoder_wait_seconds=60) as both:

        def ask(number: int) -> int:
            seeds = range(63_000 + number * pictures_each, 63_000 + (number + 1) * pictures_each)
            parts = [picture_of(pictures.encoded(pictures.noise(64, 64, seed))) for seed in seeds]
            return len(answer(both.text, asked([user(*parts, "What are they?")])).choices[0].token_ids)

        with ThreadPoolExecutor(requests) as threads:
            assert all(threads.map(ask, range(requests)))
        assert both.media.get_load().encoded_items == requests * pictures_each, "none is computed twice"
