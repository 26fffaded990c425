"""A clip for an encoder whose model transformers computes: one pass for all who ask, and every lease comes back."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests import sounds
from tests.launch import Service, encoder_server
from tests.rpc.encoder_client import WORKER, Client, frozen, handed
from tests.rpc.pairs import ENCODER_FLAGS
from tests.waiting import until
from tools.models.tiny import make
from twinlens import audio
from twinlens.v1 import encoder_pb2

CALLERS = 100


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Who reads its memory may take as long as a busy machine makes it."""
    flags = {**ENCODER_FLAGS, "lease_seconds": 600}
    with encoder_server(make("qwen3_asr", tmp_path_factory.mktemp("ears")), light=False, **flags) as running:
        yield running


def test_a_clip_that_a_hundred_ask_for_at_once_is_encoded_once_and_all_leases_come_back(hearing: Service) -> None:
    clip = audio(sounds.encoded(sounds.tune(1.2, 83)))
    with Client(hearing) as client:
        before, offered = client.load(), client.info().local_socket
        link, shared = handed(offered)
        with link, os.fdopen(shared.arena, "rb") as arena, os.fdopen(shared.board, "rb"):
            accepts, host = [encoder_pb2.TRANSPORT_SHARED_MEMORY], encoder_pb2.HostProof(grant=shared.grant)
            with frozen(hearing, WORKER):
                streams = [client.start([clip], accepts=accepts, host=host) for _ in range(CALLERS)]
                until(lambda: client.load().open_streams == CALLERS, "all have asked")
            handles = [next(event.rows.handle for event in stream if event.HasField("rows")) for stream in streams]
            assert client.load().leases == len({handle.lease for handle in handles}) == CALLERS
            read = {os.pread(arena.fileno(), each.length, each.offset) for each in handles}
            names = [handle.lease for handle in handles]
            assert client.stub.Release(encoder_pb2.ReleaseRequest(leases=names)).released == CALLERS
            for stream in streams:
                assert [kind for event in stream if (kind := event.WhichOneof("event")) != "progress"] == ["done"]
        until(lambda: client.load().leases == 0, "every lease is given back")
        until(lambda: client.load().open_streams == 0, "no stream is left")
        after = client.load()
        assert (after.encoded_items - before.encoded_items, after.vit_calls - before.vit_calls) == (1, 1)
        assert (after.store_misses - before.store_misses, after.store_hits - before.store_hits) == (1, CALLERS - 1)
        stored = client.one(clip)
        assert stored.header.cached
        assert read == {stored.rows.tobytes()}
