"""What the encoder service computes once and keeps: keys, tenants, single passes, a bounded store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tests import pictures
from tests.launch import encoder_server
from tests.rpc.encoder_client import (
    IMAGE,
    VIDEO,
    Client,
    image,
    new_picture,
)
from tests.waiting import until
from twinlens.v1 import encoder_pb2, media_pb2

NOT_FOUND = 5


def test_the_same_picture_twice_is_one_pass_of_the_tower(client):
    data = new_picture()
    before = client.load()
    first, second = client.one(image(data)), client.one(image(data))
    after = client.load()
    assert (first.header.cached, second.header.cached) == (False, True)
    assert np.array_equal(first.rows, second.rows)
    assert first.header.key == second.header.key
    assert after.vit_calls - before.vit_calls == 1
    assert (after.store_hits - before.store_hits, after.store_misses - before.store_misses) == (1, 1)
    assert after.encoded_items - before.encoded_items == 1


def test_fifty_calls_for_one_new_picture_are_one_pass_of_the_tower(client):
    data = new_picture()
    before = client.load()
    with ThreadPoolExecutor(50) as pool:
        found = list(pool.map(lambda _: client.one(image(data)), range(50)))
    after = client.load()
    assert after.vit_calls - before.vit_calls == 1
    assert after.vit_patches - before.vit_patches == found[0].header.grid.h * found[0].header.grid.w
    assert (after.store_hits - before.store_hits, after.store_misses - before.store_misses) == (49, 1)
    assert all(np.array_equal(found[0].rows, each.rows) for each in found)


def test_different_pictures_options_and_tenants_share_nothing(client):
    data = new_picture(300, 300)
    found = [
        client.one(image(data)),
        client.one(image(new_picture(300, 300))),
        client.one(image(data, max_pixels=64 * 64)),
        client.one(image(data), cache_salt="tenant"),
    ]
    assert len({each.header.key for each in found}) == 4
    assert not any(each.header.cached for each in found)
    assert not np.allclose(found[0].rows, found[1].rows)
    assert found[2].header.tokens < found[0].header.tokens
    assert np.array_equal(found[0].rows, found[3].rows)


def test_a_key_alone_is_enough_for_the_tenant_who_made_it(client):
    made = client.one(image(new_picture()), cache_salt="mine")
    by_key = media_pb2.Media(modality=IMAGE, key=made.header.key)
    mine = client.one(by_key, cache_salt="mine")
    assert mine.header.cached
    assert np.array_equal(mine.rows, made.rows)

    theirs, absent, other_kind = (
        client.one(by_key, cache_salt="theirs").error,
        client.one(media_pb2.Media(modality=IMAGE, key=b"x" * 32)).error,
        client.one(media_pb2.Media(modality=VIDEO, key=made.header.key), cache_salt="mine").error,
    )
    assert theirs.code == absent.code == other_kind.code == NOT_FOUND
    assert theirs.message == absent.message == other_kind.message

    def probe(salt: str) -> list[bool]:
        request = encoder_pb2.ProbeRequest(keys=[made.header.key, b"x" * 32], cache_salt=salt)
        return list(client.stub.Probe(request).present)

    assert (probe("mine"), probe("theirs")) == ([True, False], [False, False])


def test_headers_alone_compute_nothing(client):
    before = client.load()
    found = client.one(image(new_picture(90, 90)), header_only=True)
    assert (found.header.tokens, found.pieces, found.error) == (
        found.header.grid.h * found.header.grid.w // 4,
        [],
        None,
    )
    after = client.load()
    assert (after.vit_calls, after.store_entries) == (before.vit_calls, before.store_entries)


def test_what_was_prefetched_is_there(client):
    data = new_picture()
    request = encoder_pb2.PrefetchRequest(items=[image(data), image(b"junk")])
    answer = client.stub.Prefetch(request)
    (header,), (error,) = answer.headers, answer.errors
    assert (header.item, error.item, error.status.reason) == (0, 1, "MEDIA_FORMAT")
    probe = encoder_pb2.ProbeRequest(keys=[header.key])
    until(lambda: client.stub.Probe(probe).present[0], "the rows are in the store")
    assert client.one(image(data)).header.cached


def test_a_flush_forgets_everything(client):
    data = new_picture()
    client.one(image(data))
    flushed = client.stub.FlushCache(encoder_pb2.EncoderServiceFlushCacheRequest())
    load = client.load()
    assert flushed.entries > 0 < flushed.bytes
    assert (load.store_entries, load.store_bytes) == (0, 0)
    assert not client.one(image(data)).header.cached


def test_a_small_store_never_grows_past_its_budget(checkpoints):
    with encoder_server(checkpoints("qwen2_vl"), store_bytes="64KiB") as service, Client(service) as client:
        datas = [new_picture(224, 224) for _ in range(40)]
        sizes = []
        with ThreadPoolExecutor(8) as pool:
            for found in pool.map(lambda data: client.one(image(data)), datas):
                assert found.error is None
                load = client.load()
                sizes.append(load.store_bytes)
                assert load.store_bytes <= load.store_capacity_bytes
        assert max(sizes) > 0
        last, first = client.one(image(datas[-1])), client.one(image(datas[0]))
        assert (last.header.cached, first.header.cached) == (True, False)


def test_broken_media_push_nothing_out_of_the_store(checkpoints):
    with encoder_server(checkpoints("qwen2_vl"), store_bytes="64KiB") as service, Client(service) as client:
        good = [new_picture(224, 224) for _ in range(3)]
        for data in good:
            client.one(image(data))
        for name in ("astronaut", "coffee", "chelsea", "rocket"):
            broken = pictures.encoded(pictures.photograph(name), "JPEG")[:9000]
            assert client.one(image(broken)).error.reason == "MEDIA_UNREADABLE"
        assert all(client.one(image(data)).header.cached for data in good)


def test_memory_comes_back_after_a_large_picture(service, client):
    assert client.one(image(pictures.encoded(pictures.noise(3000, 2000), "BMP"))).error is None
    folder = Path(f"/proc/{service.pid}/fd")
    staging = next(link for link in folder.iterdir() if "memfd:twinlens-staging" in str(link.readlink()))
    assert staging.stat().st_size == 1 << 30
    until(lambda: staging.stat().st_blocks * 512 < 8 << 20, "it is the system's again")
