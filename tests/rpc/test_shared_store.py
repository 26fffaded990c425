"""Two encoders over one shared store, as their callers see them: one pass in all, and no error whatever it does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import numpy as np
import pytest

from tests import pictures, valkey_server
from tests.launch import encoder_server
from tests.rpc.encoder_client import IMAGE, Client, Encoded, image, video
from tests.rpc.pairs import ENCODER_FLAGS
from tests.waiting import until
from twinlens.v1 import encoder_pb2, media_pb2

_seed = itertools.count(91_000)


def new_picture() -> bytes:
    return pictures.encoded(pictures.noise(120, 90, next(_seed)))


@contextmanager
def replicas(folder, url: str, **flags: object) -> Iterator[tuple[Client, Client]]:
    given = {**ENCODER_FLAGS, "shared_store": url, **flags}
    with (
        encoder_server(folder, **given) as one,
        encoder_server(folder, **given) as two,
        Client(one) as first,
        Client(two) as second,
    ):
        yield first, second


@pytest.fixture(scope="module")
def server():
    with valkey_server.server() as running:
        yield running


@pytest.fixture(scope="module")
def pair(checkpoints, server):
    """Whose server may take as long as a busy machine makes it."""
    with replicas(checkpoints("qwen3_vl"), server.url, shared_store_seconds=60, shared_wait_seconds=60) as both:
        yield both


def until_shared(other: Client, made: Encoded, salt: str = "") -> None:
    """Waits until the other encoder finds what one has made. A count of what that one has written would tell of other
    items as well."""
    probe = encoder_pb2.ProbeRequest(keys=[made.header.key], cache_salt=salt)
    until(lambda: other.stub.Probe(probe).present[0], "the rows are shared")


def passes(*clients: Client) -> int:
    return sum(client.load().vit_calls for client in clients)


def test_many_callers_of_two_encoders_get_one_pass_of_one_tower(pair):
    data, before = new_picture(), passes(*pair)
    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(lambda number: pair[number % 2].one(image(data)), range(24)))
    assert passes(*pair) == before + 1
    assert all(np.array_equal(each.rows, found[0].rows) for each in found)


def test_a_video_that_one_encoder_computed_is_whole_at_the_other(pair):
    one, two = pair
    clip = video(pictures.video(pictures.frames(20, seed=7), fps=8))
    first, before = one.one(clip), passes(*pair)
    until_shared(two, first)
    second = two.one(clip)
    assert (second.header.cached, passes(*pair)) == (True, before)
    assert (second.header.grid, second.header.timestamps) == (first.header.grid, first.header.timestamps)
    assert np.array_equal(first.rows, second.rows)


def test_of_a_pruned_video_both_encoders_keep_the_rows_that_one_has_chosen(pair):
    one, two = pair
    clip = video(pictures.video(pictures.frames(20, seed=8), fps=8), video_pruning_rate=0.6)
    first, before = one.one(clip), passes(*pair)
    until_shared(two, first)
    second = two.one(clip)
    assert (second.header.cached, second.headers, passes(*pair)) == (True, 1, before)
    assert (second.header.kept_rows, second.header.grid_rows) == (first.header.kept_rows, first.header.grid_rows)
    assert np.array_equal(first.rows, second.rows)


def test_a_key_is_found_in_the_shared_store_by_its_own_tenant_alone(pair):
    one, two = pair
    found = one.one(image(new_picture()), cache_salt="mine")
    until_shared(two, found, "mine")
    by_key = media_pb2.Media(modality=IMAGE, key=found.header.key)
    absent = media_pb2.Media(modality=IMAGE, key=b"k" * 32)
    theirs, nowhere = two.one(by_key, cache_salt="theirs"), two.one(absent, cache_salt="theirs")
    assert (
        (theirs.error.code, theirs.error.message)
        == (nowhere.error.code, nowhere.error.message)
        == (
            5,
            "no such key is in the store",
        )
    )
    ask = {"keys": [found.header.key, b"k" * 32]}
    assert list(two.stub.Probe(encoder_pb2.ProbeRequest(cache_salt="mine", **ask)).present) == [True, False]
    assert list(two.stub.Probe(encoder_pb2.ProbeRequest(cache_salt="theirs", **ask)).present) == [False, False]
    assert np.array_equal(two.one(by_key, cache_salt="mine").rows, found.rows)


def test_too_many_keys_at_once_are_refused(pair):
    with pytest.raises(grpc.RpcError) as refused:
        pair[0].stub.Probe(encoder_pb2.ProbeRequest(keys=[b"k" * 32] * 1025))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_garbage_in_the_shared_store_is_never_served(pair, server):
    one, two = pair
    data = new_picture()
    good = one.one(image(data))
    until_shared(two, good)
    with server.client() as client:
        for name in client.keys("twinlens:rows:*"):
            chunk = bytearray(client.hget(name, "0"))
            chunk[100] ^= 0xFF
            client.hset(name, "0", bytes(chunk))
    before = passes(*pair)
    found = two.one(image(data))
    assert np.allclose(found.rows, good.rows, rtol=1e-4, atol=1e-4)
    assert (found.error, passes(*pair)) == (None, before + 1)
    assert two.load().shared.garbage >= 1


def test_a_shared_store_that_is_killed_in_mid_run_causes_no_error(checkpoints):
    with valkey_server.server() as server, replicas(checkpoints("qwen3_vl"), server.url) as both:
        with ThreadPoolExecutor(8) as threads:
            items = [new_picture() for _ in range(40)]
            found = []
            for number, each in enumerate(threads.map(lambda n: both[n % 2].one(image(items[n // 2])), range(80))):
                found.append(each)
                if number == 10:
                    server.process.kill()
        assert [each.error for each in found] == [None] * 80
        for first, second in zip(found[::2], found[1::2], strict=True):
            assert np.allclose(first.rows, second.rows, rtol=1e-4, atol=1e-4)


def test_a_slow_shared_store_causes_no_error_and_is_soon_left_alone(checkpoints):
    with valkey_server.server() as server, valkey_server.proxy(server) as slow:
        slow.delay = 0.5
        with replicas(checkpoints("qwen3_vl"), slow.url, shared_store_seconds=0.05) as (one, two):
            for client in (one, two):
                assert [client.one(image(new_picture())).error for _ in range(20)] == [None] * 20
                assert 0 < client.load().shared.errors < 20
