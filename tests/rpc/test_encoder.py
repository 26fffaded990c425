"""The encoder service as its callers see it: real processes, real gRPC."""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import decord
import grpc
import numpy as np
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests import pictures
from tests.checkpoints import FAMILIES
from tests.launch import Service, command_line, encoder_server
from tests.rpc.encoder_client import IMAGE, VIDEO, Client, Encoded, image, video
from tests.waiting import until
from twinlens.v1 import encoder_pb2, media_pb2

NOT_FOUND, EXHAUSTED, INTERNAL, UNAVAILABLE = 5, 8, 13, 14
WORKER, DECODER = "encoder_service.worker", "encoder_service.media"

_seed = itertools.count(5000)


def new_picture(width: int = 60, height: int = 60) -> bytes:
    """A picture that no test has sent before."""
    return pictures.encoded(pictures.noise(width, height, next(_seed)))


@pytest.fixture(scope="module")
def service(checkpoints) -> Iterator[Service]:
    with encoder_server(checkpoints("qwen3_vl")) as running:
        yield running


@pytest.fixture(scope="module")
def client(service) -> Iterator[Client]:
    with Client(service) as calls:
        yield calls


@contextmanager
def frozen(service: Service, module: str) -> Iterator[None]:
    """The service's processes of this module stand still for the length of the block."""
    pids = service.children(module)
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in set(pids) & set(service.children(module)):
            os.kill(pid, signal.SIGCONT)


def follow(stream, event: str, found: Encoded | None = None) -> Encoded:
    """Reads one item's stream up to the first event of this kind."""
    found = found or Encoded()
    for each in stream:
        found.add(each)
        if each.WhichOneof("event") == event:
            return found
    raise AssertionError(f"the stream ended without {event}")


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_and_a_video_have_the_reference_s_rows(family, checkpoints):
    from tests import reference

    folder = checkpoints(family, layout="saved", sharded=True)
    photographs = [pictures.photograph("astronaut"), pictures.photograph("coffee")]
    clip = pictures.video(pictures.frames(33), fps=10)
    with encoder_server(folder) as service, Client(service) as client:
        found = client.encode(*(image(pictures.encoded(each)) for each in photographs), video(clip))

    rows = reference.rows(folder, *reference.images_inputs(folder, photographs))
    ours = torch.from_numpy(np.concatenate([each.rows for each in found[:2]]))
    torch.testing.assert_close(ours, rows, rtol=1e-4, atol=1e-4)

    reader = decord.VideoReader(io.BytesIO(clip))
    decoded = reference.Video(reader.get_batch(range(len(reader))).asnumpy(), reader.get_avg_fps())
    patches, grids, _ = reference.video_inputs(folder, decoded)
    torch.testing.assert_close(
        torch.from_numpy(found[2].rows.copy()), reference.rows(folder, patches, grids), rtol=1e-4, atol=1e-4
    )
    header = found[2].header
    assert [header.grid.t, header.grid.h, header.grid.w] == grids[0].tolist()
    assert len(header.timestamps) == header.grid.t


def test_it_says_what_it_is(client):
    info = client.info()
    assert (info.architecture, info.width, info.levels) == ("Qwen3VLForConditionalGeneration", 64, 3)
    assert info.dtype == media_pb2.DATA_TYPE_FLOAT32
    assert list(info.modalities) == [IMAGE, VIDEO]
    assert list(info.devices) == ["cpu"]
    assert len(info.digest) == 64
    assert list(info.transports) == [encoder_pb2.TRANSPORT_SHARED_MEMORY, encoder_pb2.TRANSPORT_INLINE]
    assert list(info.unimplemented) == []
    assert client.stub.Release(encoder_pb2.ReleaseRequest(leases=["x"])).released == 0


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


def test_decoded_frames_are_taken_as_they_are(client):
    frames = pictures.frames(5)
    block = media_pb2.PixelBlock(data=frames.tobytes(), frames=5, height=96, width=128, timestamps=[0, 0.5, 1, 1.5, 2])
    found = client.one(media_pb2.Media(modality=VIDEO, pixels=block))
    assert found.header.grid.t == 3
    assert list(found.header.timestamps) == [0.25, 1.25, 2.0]
    assert found.header.seconds_per_grid == 1.0
    assert len(found.rows) == found.header.tokens


def test_rows_that_were_computed_elsewhere_are_kept_under_a_key(client):
    made = client.one(image(new_picture(96, 64)))
    block = media_pb2.EmbeddingBlock(
        data=made.rows.tobytes(),
        dtype=made.header.dtype,
        count=made.header.tokens,
        levels=made.header.levels,
        width=made.header.width,
        grid=made.header.grid,
    )
    before = client.load()
    given = client.one(media_pb2.Media(modality=IMAGE, embedding=block))
    by_key = client.one(media_pb2.Media(modality=IMAGE, key=given.header.key))
    assert np.array_equal(made.rows, given.rows)
    assert np.array_equal(made.rows, by_key.rows)
    assert client.load().vit_calls == before.vit_calls


def test_an_error_names_the_item_by_its_place_in_the_caller_s_own_request(service, client):
    broken = image(pictures.encoded(pictures.photograph("rocket"), "JPEG")[:8000])
    with frozen(service, DECODER):
        first = client.start([broken])
        until(lambda: client.load().queued_items == 1, "the first waits")
        second = client.start([image(new_picture()), broken])
        until(lambda: client.load().store_hits + client.load().queued_items > 1, "the second waits")
    fields = [event.error.status.field for stream in (first, second) for event in stream if event.HasField("error")]
    assert fields == ["items[0]", "items[1]"]


def test_the_header_leaves_and_progress_is_reported_while_the_worker_is_busy(service, client):
    with frozen(service, WORKER):
        stream = client.start([image(new_picture())])
        found = follow(stream, "header")
        found = follow(stream, "progress", found)
        assert found.header.tokens
        assert found.progress
        assert not found.pieces
    assert len(follow(stream, "done", found).rows) == found.header.tokens


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


def test_a_killed_decode_process_costs_no_error(service, client):
    with frozen(service, DECODER):
        stream = client.start([image(new_picture())])
        until(lambda: client.load().queued_items == 1, "the item is with a decode process")
        for pid in service.children(DECODER)[:1]:
            os.kill(pid, signal.SIGKILL)
    assert len(follow(stream, "done").rows)
    until(lambda: len(service.children(DECODER)) == 2, "it is replaced")
    assert client.one(image(new_picture())).error is None


def test_a_stuck_decoder_is_the_media_s_fault_and_is_replaced(checkpoints):
    with (
        encoder_server(checkpoints("qwen2_vl"), decode_seconds=0.5, decode_processes=1) as service,
        Client(service) as client,
    ):
        with frozen(service, DECODER):
            stuck = client.one(video(pictures.video(pictures.frames(8))))
        assert (stuck.error.code, stuck.error.reason) == (3, "MEDIA_TOO_SLOW")
        until(lambda: len(service.children(DECODER)) == 1, "it is replaced")
        assert client.one(image(new_picture())).error is None


def test_a_killed_worker_fails_what_it_had_and_comes_back(checkpoints):
    with encoder_server(checkpoints("qwen2_vl")) as service, Client(service) as client:
        data = new_picture()
        before = client.one(image(new_picture()))
        with frozen(service, WORKER):
            stream = client.start([image(data)])
            found = follow(stream, "header")
            until(lambda: client.load().running_items == 1, "it is with the worker")
            (pid,) = service.children(WORKER)
            os.kill(pid, signal.SIGKILL)
            found = follow(stream, "error", found)
        assert (found.error.code, found.error.reason) == (UNAVAILABLE, "NO_WORKER")
        assert found.error.HasField("retry_after_ms")

        health = health_pb2_grpc.HealthStub(client.channel)
        check = health_pb2.HealthCheckRequest(service="twinlens.v1.EncoderService")
        serving = health_pb2.HealthCheckResponse.SERVING
        until(lambda: health.Check(check).status == serving and not client.one(image(data)).error, "it is back")
        assert before.error is None
        assert client.load().store_entries == 2


def test_a_killed_worker_costs_no_error_where_there_is_another(checkpoints):
    with encoder_server(checkpoints("qwen2_vl"), workers=2) as service, Client(service) as client:
        with frozen(service, WORKER):
            stream = client.start([image(new_picture())])
            follow(stream, "header")
            until(lambda: client.load().running_items == 1, "it is with a worker")
            os.kill(service.children(WORKER)[0], signal.SIGKILL)  # idle workers are given work in order
        found = follow(stream, "done", Encoded(header=encoder_pb2.EncodeHeader(levels=1, width=64, dtype=1)))
        assert len(found.rows)
        until(lambda: len(service.children(WORKER)) == 2, "it is replaced")


def test_media_that_ends_workers_is_refused_in_the_end(checkpoints):
    with encoder_server(checkpoints("qwen2_vl")) as service, Client(service) as client:
        poison = image(new_picture())
        for _ in range(2):
            until(lambda: not client.one(image(new_picture())).error, "a worker is there")
            with frozen(service, WORKER):
                stream = client.start([poison])
                found = follow(stream, "header")
                until(lambda: client.load().running_items == 1, "it is with the worker")
                (pid,) = service.children(WORKER)
                os.kill(pid, signal.SIGKILL)
                found = follow(stream, "error", found)
        assert (found.error.code, found.error.reason) == (INTERNAL, "POISON_ITEM")
        until(lambda: not client.one(image(new_picture())).error, "a worker is there")
        assert client.one(poison).error.reason == "POISON_ITEM"
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


def test_cutting_a_video_and_packing_pictures_changes_no_row(checkpoints):
    folder = checkpoints("qwen2_5_vl")
    clip, photographs = pictures.video(pictures.frames(60)), [new_picture(200, 100), new_picture(70, 300)]
    items = [video(clip), *map(image, photographs)]
    with encoder_server(folder) as service, Client(service) as client:
        whole = client.encode(*items)
    with encoder_server(folder, workers=2, batch_patches=80) as service, Client(service) as client:
        cut = client.encode(*items)
        assert client.load().vit_calls > 3
    for one, other in zip(whole, cut, strict=True):
        assert one.header.key == other.header.key
        np.testing.assert_allclose(one.rows, other.rows, rtol=1e-4, atol=1e-4)


def test_a_frame_with_too_many_patches_is_refused(checkpoints):
    folder = checkpoints("qwen2_vl")
    with encoder_server(folder, max_patches_per_call=16, batch_patches=16) as service, Client(service) as client:
        assert client.one(image(new_picture(300, 300))).error.reason == "TOO_MANY_PATCHES"


def test_only_who_has_the_token_gets_in(checkpoints):
    with encoder_server(checkpoints("qwen2_vl"), auth_token="secret") as service:
        with Client(service) as stranger, pytest.raises(grpc.RpcError) as refused:
            stranger.one(image(new_picture()))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with Client(service, token="secret") as friend:
            assert friend.one(image(new_picture())).error is None


def test_a_stream_that_runs_when_the_service_is_told_to_stop_is_finished(checkpoints):
    with encoder_server(checkpoints("qwen2_vl")) as service, Client(service) as client:
        with frozen(service, WORKER):
            stream = client.start([image(new_picture())])
            found = follow(stream, "header")
            service.process.send_signal(signal.SIGTERM)
            found = follow(stream, "progress", found)
        assert len(follow(stream, "done", found).rows) == found.header.tokens
        assert service.process.wait(30) == 0


def test_nothing_outlives_a_service_that_is_killed(checkpoints):
    with encoder_server(checkpoints("qwen2_vl"), exit_code=-signal.SIGKILL) as service:
        below = list(service.descendants())
        assert len(below) == 3
        service.process.kill()
        until(lambda: not any(map(command_line, below)), "its processes are gone")


def test_memory_comes_back_after_a_large_picture(service, client):
    assert client.one(image(pictures.encoded(pictures.noise(3000, 2000), "BMP"))).error is None
    folder = Path(f"/proc/{service.pid}/fd")
    staging = next(link for link in folder.iterdir() if "memfd:twinlens-staging" in str(link.readlink()))
    assert staging.stat().st_size == 1 << 30
    assert staging.stat().st_blocks * 512 < 8 << 20


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_come_in_the_type_that_was_asked_for(checkpoints, dtype):
    data = new_picture(100, 80)
    found = {}
    for name in ("float32", dtype):
        with encoder_server(checkpoints("qwen2_5_vl"), dtype=name) as service, Client(service) as client:
            found[name] = client.one(image(data))
            assert client.info().dtype == found[name].header.dtype
    exact, near = found["float32"].rows, found[dtype].rows
    assert near.shape == exact.shape
    cosine = (exact * near).sum(-1) / np.linalg.norm(exact, axis=-1) / np.linalg.norm(near, axis=-1)
    assert 0.98 < cosine.min() < 1
    assert found["float32"].header.key != found[dtype].header.key


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "unheard_of"}, "unheard_of is not supported"),
        ({"vision_config": None}, "no vision tower"),
        ({"vision_config": {"depth": 4}}, "do not fit"),
    ],
)
def test_a_checkpoint_that_cannot_be_served_ends_it_with_one_line(checkpoints, tmp_path, change, says):
    folder = Path(shutil.copytree(checkpoints("qwen2_vl"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    for name, value in change.items():
        config[name] = {**config[name], **value} if isinstance(value, dict) else value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match=says), encoder_server(folder):
        pass


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"model": "/nowhere/at/all"}, "neither a folder nor a hub name"),
        ({"dtype": "float8"}, "invalid choice"),
        ({"max_ratio": "nan"}, "outside"),
        ({"no_such_option": "1"}, "unrecognized arguments"),
    ],
)
def test_a_bad_option_ends_it_with_one_line(checkpoints, flags, says):
    from tests.launch import launch

    given = {"model": checkpoints("qwen2_vl"), **flags}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    with pytest.raises(RuntimeError, match=says), launch("encoder_service", *words):
        pass


def test_a_stream_that_outlasts_the_grace_time_is_ended_and_the_service_ends_well(checkpoints):
    with encoder_server(checkpoints("qwen2_vl"), grace_seconds=0.2) as service, Client(service) as client:
        with frozen(service, WORKER):
            stream = client.start([image(new_picture())])
            found = follow(stream, "header")
            service.process.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.RpcError):
                follow(stream, "done", found)
        assert service.process.wait(30) == 0
