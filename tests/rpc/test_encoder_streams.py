"""Streams of the encoder service: what is said when, and what ends them early."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from tests import pictures
from tests.launch import encoder_server, send
from tests.rpc.encoder_client import (
    DECODER,
    WORKER,
    Client,
    Encoded,
    follow,
    frozen,
    handed,
    image,
    new_picture,
)
from tests.waiting import until
from twinlens.errors import error_from
from twinlens.v1 import encoder_pb2, encoder_pb2_grpc

EXHAUSTED = 8


def test_an_error_names_the_item_by_its_place_in_the_caller_s_own_request(service, client):
    broken, hits = image(pictures.encoded(pictures.photograph("rocket"), "JPEG")[:8000]), client.load().store_hits
    with frozen(service, DECODER):
        first = client.start([broken])
        until(lambda: client.load().queued_items == 1, "the first waits")
        second = client.start([image(new_picture()), broken])
        until(lambda: client.load().store_hits == hits + 1, "the second waits for what the first has begun")
    fields = [event.error.status.field for stream in (first, second) for event in stream if event.HasField("error")]
    assert fields == ["items[0]", "items[1]"]


def test_the_line_about_a_call_says_what_came_of_its_items(service, client):
    broken = image(pictures.encoded(pictures.photograph("rocket"), "JPEG")[:8000])
    rows = sum(event.rows.count for event in client.start([image(new_picture()), broken], request_id="one and none"))

    def lines() -> list[dict[str, Any]]:
        found = (json.loads(line) for line in service.log.read_text().splitlines() if "one and none" in line)
        return [each for each in found if each["event"] == "call"]

    until(lambda: bool(lines()), "it is logged")
    (line,) = lines()
    assert (line["outcome"], line["items"], line["failed"], line["rows"]) == ("OK", 2, ["MEDIA_UNREADABLE"], rows)
    assert {"hash", "vit", "transfer"} <= line["stages"].keys()


def test_who_leaves_with_the_last_item_has_cancelled_nothing(service, client):
    """As an LLM service does: it has all rows, and does not wait for the call's end."""
    picture = image(new_picture())
    for _ in range(60):
        stream = client.start([picture], request_id="leaves with the last")
        follow(stream, "done")
        stream.cancel()

    def outcomes() -> list[str]:
        found = (json.loads(line) for line in service.log.read_text().splitlines() if "leaves with the last" in line)
        return [each["outcome"] for each in found if each["event"] == "call"]

    until(lambda: len(outcomes()) == 60, "all are logged")
    assert set(outcomes()) == {"OK"}


def test_the_header_leaves_and_progress_is_reported_while_the_worker_is_busy(service, client):
    with frozen(service, WORKER):
        stream = client.start([image(new_picture())])
        found = follow(stream, "header")
        found = follow(stream, "progress", found)
        assert found.header.tokens
        assert found.progress
        assert not found.pieces
    assert len(follow(stream, "done", found).rows) == found.header.tokens


def test_who_gives_a_lease_back_by_its_name_is_told_so_and_the_stream_goes_on(client):
    offered = client.info().local_socket
    link, shared = handed(offered)
    with link, os.fdopen(shared.arena, "rb"), os.fdopen(shared.board, "rb"):
        host = encoder_pb2.HostProof(grant=shared.grant)
        stream = client.start([image(new_picture())], accepts=[encoder_pb2.TRANSPORT_SHARED_MEMORY], host=host)
        lease = next(event.rows.handle.lease for event in stream if event.HasField("rows"))
        assert client.load().leases == 1
        assert client.stub.Release(encoder_pb2.ReleaseRequest(leases=[lease, "x"])).released == 1
        rest = [event.WhichOneof("event") for event in stream]
        assert [event for event in rest if event != "progress"] == ["done"]
        assert client.load().leases == 0
        assert client.stub.Release(encoder_pb2.ReleaseRequest(leases=[lease])).released == 0


def test_a_call_that_is_cancelled_drops_what_no_one_has_begun(service, client):
    before = client.load()
    with frozen(service, WORKER):
        running = client.start([image(new_picture())])
        follow(running, "header")
        until(lambda: client.load().running_items == 1, "the first item is with the worker")
        waiting = [client.start([image(new_picture())]) for _ in range(3)]
        for each in waiting:
            follow(each, "header")
        until(lambda: client.load().queued_patches > 0, "others wait")
        for each in waiting:
            each.cancel()
        until(lambda: client.load().queued_items == 0, "they are dropped")
        assert client.load().queued_patches == 0
    follow(running, "done", Encoded(header=encoder_pb2.EncodeHeader(levels=3, width=64, dtype=1)))
    assert client.load().vit_calls - before.vit_calls == 1
    assert client.one(image(new_picture())).error is None


def test_a_deadline_ends_a_call_that_waits(service, client):
    with frozen(service, WORKER):
        with pytest.raises(grpc.RpcError) as late:
            client.one(image(new_picture()), timeout=1)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        until(lambda: client.load().open_streams == 0, "the stream is closed")
    assert client.one(image(new_picture())).error is None


def test_a_full_queue_is_said_at_once_with_a_hint(checkpoints):
    with encoder_server(checkpoints("qwen2_vl"), max_queued_items=2) as service, Client(service) as client:
        with frozen(service, WORKER):
            streams = [client.start([image(new_picture())]) for _ in range(2)]
            heads = [follow(stream, "header") for stream in streams]
            refused = client.one(image(new_picture()))
        assert (refused.error.code, refused.error.reason) == (EXHAUSTED, "QUEUE_FULL")
        assert refused.error.retry_after_ms > 0
        assert all(len(follow(*pair).rows) for pair in zip(streams, ["done"] * 2, heads, strict=True))
        assert client.one(image(new_picture())).error is None


def test_two_hundred_calls_at_once_all_finish_or_are_refused(client):
    datas = [new_picture() for _ in range(200)]
    with ThreadPoolExecutor(200) as pool:
        found = list(pool.map(lambda data: client.one(image(data)), datas))
    for each in found:
        assert each.error is None or each.error.code == EXHAUSTED
    assert sum(each.error is None for each in found) > 0


def test_a_stream_that_runs_when_the_service_is_told_to_stop_is_finished(checkpoints):
    with encoder_server(checkpoints("qwen2_vl")) as service, Client(service) as client:
        with frozen(service, WORKER):
            stream = client.start([image(new_picture())])
            found = follow(stream, "header")
            service.process.send_signal(signal.SIGTERM)
            found = follow(stream, "progress", found)
        assert len(follow(stream, "done", found).rows) == found.header.tokens
        assert service.process.wait(120) == 0


def test_a_stream_is_finished_though_all_processes_are_told_to_stop(checkpoints):
    """As systemd stops a unit."""
    with encoder_server(checkpoints("qwen2_vl")) as service, Client(service) as client:
        with frozen(service, WORKER):
            stream = client.start([image(new_picture())])
            found = follow(stream, "header")
            for pid in (service.process.pid, *service.descendants()):
                send(pid, signal.SIGTERM)
        assert len(follow(stream, "done", found).rows) == found.header.tokens
        assert service.process.wait(120) == 0


def test_a_stream_that_outlasts_the_grace_time_is_ended_and_the_service_ends_well(checkpoints):
    with encoder_server(checkpoints("qwen2_vl"), grace_seconds=0.2) as service, Client(service) as client:
        with frozen(service, WORKER):
            stream = client.start([image(new_picture())])
            found = follow(stream, "header")
            service.process.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.RpcError):
                follow(stream, "done", found)
        assert service.process.wait(120) == 0


def test_a_caller_who_takes_nothing_is_left_and_what_was_pinned_for_him_comes_back(checkpoints):
    """His window is full after some kilobytes; sixteen pictures are megabytes."""
    pictures_of_rows = [image(new_picture(600, 600)) for _ in range(16)]
    with encoder_server(checkpoints("qwen3_vl"), stall_seconds=3) as service, Client(service) as client:
        narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]
        with grpc.insecure_channel(service.address, narrow) as channel:
            request = encoder_pb2.EncodeRequest(items=pictures_of_rows)
            stalled = encoder_pb2_grpc.EncoderServiceStub(channel).Encode(request)
            until(lambda: client.load().encoded_items > 0, "something is computed for him")
            until(lambda: client.load().open_streams == 0, "he is left")
            until(lambda: client.load().queued_items + client.load().running_items == 0, "nothing goes on for him")
            with pytest.raises(grpc.RpcError) as ended:
                list(stalled)
            assert error_from(ended.value).reason == "CALLER_STALLED"
        kept = client.load().store_entries
        flushed = client.stub.FlushCache(encoder_pb2.EncoderServiceFlushCacheRequest())
        assert flushed.entries == kept > 0, "none is pinned"
        assert client.one(image(new_picture())).error is None
