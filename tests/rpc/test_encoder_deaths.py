"""Processes of the encoder service that are killed or stand still: what their work becomes, and what is left."""

from __future__ import annotations

import itertools
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests import pictures
from tests.launch import Service, command_line, encoder_server
from tests.rpc.encoder_client import (
    DECODER,
    WORKER,
    Client,
    Encoded,
    follow,
    frozen,
    image,
    new_picture,
    video,
)
from tests.waiting import until
from twinlens.v1 import encoder_pb2

INTERNAL, UNAVAILABLE = 13, 14


def test_a_killed_decode_process_costs_no_error(strict):
    """It is the only one, so that it has the item."""
    service, client = strict.service, strict.client
    with frozen(service, DECODER):
        stream = client.start([image(new_picture())])
        until(lambda: client.load().queued_items == 1, "the item is with the decode process")
        (pid,) = service.children(DECODER)
        os.kill(pid, signal.SIGKILL)
    assert len(follow(stream, "done").rows)
    until(lambda: service.children(DECODER) not in ([], [pid]), "it is replaced")
    assert client.one(image(new_picture())).error is None


def test_where_no_decode_process_can_be_started_callers_and_probes_are_told_until_one_can(checkpoints):
    with (
        encoder_server(checkpoints("qwen2_vl"), decode_processes=1, fork=False) as service,
        Client(service) as client,
    ):
        data = new_picture()
        kept = client.one(image(data))
        health = health_pb2_grpc.HealthStub(client.channel)
        check = health_pb2.HealthCheckRequest(service="twinlens.v1.EncoderService")
        assert health.Check(check).status == health_pb2.HealthCheckResponse.SERVING
        with no_descriptor_left(service):
            os.kill(service.children(DECODER)[0], signal.SIGKILL)
            failed = client.one(image(new_picture()))
            assert (failed.error.code, failed.error.reason) == (UNAVAILABLE, "NO_DECODER")
            assert failed.error.HasField("retry_after_ms")
            until(lambda: health.Check(check).status == health_pb2.HealthCheckResponse.NOT_SERVING, "probes are told")
            assert np.array_equal(client.one(image(data)).rows, kept.rows), "what is here needs no decoding"
        until(lambda: health.Check(check).status == health_pb2.HealthCheckResponse.SERVING, "it is replaced")
        assert client.one(image(new_picture())).error is None


@contextmanager
def no_descriptor_left(service: Service) -> Iterator[None]:
    """The service can open nothing, and so start no process, for the length of the block."""
    numbers = {int(path.name) for path in Path(f"/proc/{service.pid}/fd").iterdir()}
    free = next(number for number in itertools.count() if number not in numbers)
    before = resource.prlimit(service.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(service.pid, resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.prlimit(service.pid, resource.RLIMIT_NOFILE, before)


def test_stopped_decode_processes_cost_no_error(checkpoints):
    """Each stands still for the time that an item may take; the one that is started then does the job."""
    with (
        encoder_server(checkpoints("qwen2_vl"), decode_seconds=1, decode_processes=1) as service,
        Client(service) as client,
    ):
        stopped = service.children(DECODER)
        with frozen(service, DECODER):
            assert client.one(video(pictures.video(pictures.frames(8)))).error is None
        until(lambda: len(service.children(DECODER)) == 1, "it is replaced")
        assert service.children(DECODER) != stopped
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


def test_nothing_outlives_a_service_that_is_killed(checkpoints):
    with encoder_server(checkpoints("qwen2_vl"), exit_code=-signal.SIGKILL) as service:
        below = list(service.descendants())
        assert len(below) == 3
        service.process.kill()
        until(lambda: not any(map(command_line, below)), "its processes are gone")
