"""Media by address, over real services and a real media host: what comes back, and what a known key spares."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

from tests import pictures
from tests.launch import Service, encoder_server, llm_server
from tests.media_host import MediaHost, media_host
from tests.rpc.encoder_client import IMAGE, VIDEO, Client, image
from tests.rpc.pairs import ENCODER_FLAGS, LLM_FLAGS, about, answer, asked, quiet, tokens, usable
from tests.waiting import until
from twinlens import EncoderClient, LlmClient, user, v1
from twinlens.v1 import media_pb2

INVALID, DEADLINE, NOT_FOUND, FORBIDDEN, EXHAUSTED, PRECONDITION, UNAVAILABLE = 3, 4, 5, 7, 8, 9, 14

GOOD = pictures.encoded(pictures.noise(64, 48, 77_001))
OTHER = pictures.encoded(pictures.noise(64, 48, 77_002))
CLIP = pictures.video(pictures.frames(12, 64, 64, seed=77), fps=4)


@pytest.fixture(scope="module")
def host() -> Iterator[MediaHost]:
    with media_host(good=GOOD, other=OTHER, clip=CLIP, page=b"<html></html>", large=bytes(21 << 20)) as running:
        yield running


@pytest.fixture(scope="module")
def service(checkpoints, host) -> Iterator[Service]:
    with encoder_server(checkpoints("qwen3_vl"), **ENCODER_FLAGS, allow_private_media_host=host.authority) as running:
        yield running


@pytest.fixture
def client(service) -> Iterator[Client]:
    with Client(service) as calls:
        yield calls


def at(url: str, modality: int = IMAGE, **fields: object) -> media_pb2.Media:
    return media_pb2.Media(modality=modality, url=url, **fields)


def test_an_address_gives_the_rows_of_what_is_there(client, host):
    by_url, by_data = client.one(at(host.url("/good"))), client.one(image(GOOD))
    assert by_url.error is None
    assert by_url.header.key == by_data.header.key
    assert by_data.header.cached
    assert np.array_equal(by_url.rows, by_data.rows)
    assert "fetch" in {timing.stage for timing in by_url.done.timings}
    clip = client.one(at(host.url("/clip"), VIDEO, mime_type="video/mp4"))
    assert (clip.header.grid.t, clip.error) == (3, None)


def test_a_data_address_needs_no_host(client):
    address = f"data:image/png;base64,{base64.b64encode(GOOD).decode()}"
    assert np.array_equal(client.one(at(address)).rows, client.one(image(GOOD)).rows)


def test_a_known_key_spares_the_download(client, host):
    key = client.one(at(host.url("/good"))).header.key
    before = host.asked["/good"]
    again = client.one(at(host.url("/good"), known_key=key))
    assert (again.header.cached, again.header.key, host.asked["/good"]) == (True, key, before)
    assert client.one(at(host.url("/good"), known_key=key), cache_salt="other").header.key != key
    assert host.asked["/good"] == before + 1


def test_a_key_that_is_not_here_any_more_costs_a_download_and_nothing_else(client, host):
    before = host.asked["/other"]
    found = client.one(at(host.url("/other"), known_key=b"k" * 32))
    assert (found.error, host.asked["/other"]) == (None, before + 1)
    assert found.header.key == client.one(image(OTHER)).header.key


@pytest.mark.parametrize(
    ("path", "code", "reason"),
    [
        ("/status/404", PRECONDITION, "MEDIA_HOST_REFUSED"),
        ("/status/500", UNAVAILABLE, "MEDIA_HOST_UNAVAILABLE"),
        ("/silent", DEADLINE, "MEDIA_HOST_SLOW"),
        ("/endless", INVALID, "MEDIA_TOO_LARGE"),
        ("/large", INVALID, "MEDIA_TOO_LARGE"),
        ("/truncated", UNAVAILABLE, "MEDIA_HOST_UNAVAILABLE"),
        ("/page", INVALID, "MEDIA_FORMAT"),
    ],
)
def test_a_media_host_s_failure_has_its_own_status(client, host, path, code, reason):
    found = client.one(at(host.url(path)))
    assert (found.error.code, found.error.reason) == (code, reason)
    assert found.error.field.startswith("items[0]")
    assert "127.0.0.1" not in found.error.message
    assert "fetch" in found.progress or path != "/silent", "progress of a slow download is reported"
    assert client.one(image(GOOD)).error is None


def test_a_redirect_to_a_place_that_is_not_allowed_is_told_like_all_others(client, host):
    host.redirects["/away"] = "http://169.254.169.254/latest/meta-data"
    away, straight = client.encode(at(host.url("/away")), at("http://10.0.0.1/"))
    assert away.error.code == straight.error.code == FORBIDDEN
    assert away.error.message == straight.error.message


def test_many_who_want_one_address_fetch_it_once(client, host, monkeypatch):
    host.files["/popular"] = pictures.encoded(pictures.noise(90, 90, 77_003))
    before, passes = host.asked["/held"], client.load().vit_calls
    monkeypatch.setitem(host.files, "/good", host.files["/popular"])
    monkeypatch.setattr(host, "held", threading.Event())
    with ThreadPoolExecutor(16) as threads:
        waiting = [threads.submit(client.one, at(host.url("/held"))) for _ in range(16)]
        try:
            until(lambda: client.load().open_streams == 16, "all have come")
        finally:
            host.held.set()
        rows = [each.result().rows for each in waiting]
    assert host.asked["/held"] == before + 1
    assert client.load().vit_calls == passes + 1
    assert all(np.array_equal(each, rows[0]) for each in rows)


def test_the_llm_service_takes_addresses_and_answers_as_for_the_bytes(checkpoints, service, host):
    with (
        llm_server(checkpoints("qwen3_vl"), service.address, **LLM_FLAGS) as llm,
        LlmClient(llm.address) as text,
        EncoderClient(service.address) as media,
    ):
        until(lambda: usable(text, 1), "the encoder is usable")
        for each in (at(host.url("/good")), at(host.url("/good"), known_key=bytes(32))):
            asking = asked(user(each, "What is it?"))
            assert tokens(text, asking) == tokens(text, asked(about(GOOD, "What is it?")))
        key = answer(text, asked(about(GOOD, "And?"))).started.spans[0].key
        before = text.get_load()
        for _ in range(2):
            assert tokens(text, asked(user(at(host.url("/good"), known_key=key), "What is it?")))
        assert text.get_load().encode_attempts == before.encode_attempts, "its rows are here"
        for path, code in (
            ("/status/404", grpc.StatusCode.FAILED_PRECONDITION),
            ("/status/500", grpc.StatusCode.UNAVAILABLE),
            ("/endless", grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                list(_generate(llm, asked(user(at(host.url(path)), "What is it?"))))
            assert refused.value.code() is code
            assert text.get_load().encoders[0].failures == 0, "an encoder is not to blame for a media host"
        until(lambda: quiet(media), "nothing is left")


def _generate(llm: Service, request: v1.GenerateRequest):
    with grpc.insecure_channel(llm.address) as channel:
        yield from v1.LlmServiceStub(channel).Generate(request, timeout=180)
