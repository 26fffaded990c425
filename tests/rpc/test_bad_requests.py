"""Requests to the encoder that no item of theirs is to blame for, and what items say of themselves."""

from __future__ import annotations

import base64

import grpc
import pytest

from tests import pictures
from tests.rpc.encoder_client import IMAGE, image, video
from tests.rpc.refusals import FORBIDDEN, INFINITY, UNIMPLEMENTED, Bad, good, says_nothing_of_the_host
from twinlens.v1 import encoder_pb2, media_pb2

INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT


def at_url(url: str) -> media_pb2.Media:
    return media_pb2.Media(modality=IMAGE, url=url)


def data_url(body: str, mime_type: str = "image/png") -> media_pb2.Media:
    return at_url(f"data:{mime_type};base64,{body}")


def head(**options: object) -> media_pb2.Media:
    return image(b"\xff\xd8\xff", **options)


ITEMS = {
    "no kind": Bad(lambda: media_pb2.Media(data=b"x"), "BAD_MODALITY", "modality"),
    "a kind that is not known": Bad(lambda: media_pb2.Media(modality=77, data=b"x"), "BAD_MODALITY", "modality"),
    "audio": Bad(
        lambda: media_pb2.Media(modality=media_pb2.MODALITY_AUDIO, data=b"x"), "NO_AUDIO", "modality", UNIMPLEMENTED
    ),
    "no source": Bad(lambda: media_pb2.Media(modality=IMAGE), "NO_SOURCE"),
    "fps of a picture": Bad(lambda: head(fps=2.0), "BAD_OPTION", "options.fps"),
    "frames of a picture": Bad(lambda: head(max_frames=2), "BAD_OPTION", "options.max_frames"),
    "no pixels": Bad(lambda: head(min_pixels=0), "BAD_OPTION", "options.min_pixels"),
    "negative pixels": Bad(lambda: head(max_pixels=-(2**63)), "BAD_OPTION", "options.max_pixels"),
    "endless pixels": Bad(lambda: head(max_pixels=2**63 - 1), "BAD_OPTION", "options.max_pixels"),
    "bounds upside down": Bad(lambda: head(min_pixels=9000, max_pixels=8000), "BAD_OPTION", "options.min_pixels"),
    "a picture that would become too large": Bad(
        lambda: image(good().data, min_pixels=100_000_000), "TOO_MANY_PATCHES"
    ),
    **{
        f"pruning by {share}": Bad(
            lambda share=share: video(pictures.video(pictures.frames(8)), video_pruning_rate=share),
            "BAD_OPTION",
            "options.video_pruning_rate",
        )
        for share in (1.0, -1.0, INFINITY)
    },
    "only lowering the bound on a video": Bad(
        lambda: video(pictures.video(pictures.frames(8)), clamp_max_pixels=True),
        "BAD_OPTION",
        "options.clamp_max_pixels",
    ),
    "pruning of a picture": Bad(lambda: head(video_pruning_rate=0.5), "BAD_OPTION", "options.video_pruning_rate"),
    "rows of a picture": Bad(lambda: head(kept_rows=b"\1"), "BAD_OPTION", "options.kept_rows"),
    "rows that no video has": Bad(
        lambda: video(pictures.video(pictures.frames(8)), kept_rows=b"\1"), "BAD_OPTION", "options.kept_rows"
    ),
    "rows without end": Bad(
        lambda: video(pictures.video(pictures.frames(8)), kept_rows=bytes(1 << 18)), "BAD_OPTION", "options.kept_rows"
    ),
    "sound of a picture": Bad(lambda: head(with_sound=True), "BAD_OPTION", "options.with_sound"),
    "sound, and rows dropped": Bad(
        lambda: video(pictures.video(pictures.frames(8)), with_sound=True, video_pruning_rate=0.5),
        "BAD_OPTION",
        "options.with_sound",
    ),
    "sound between frames": Bad(
        lambda: video(pictures.video(pictures.frames(8)), with_sound=True),
        "NO_VIDEO_SOUND",
        "options.with_sound",
        UNIMPLEMENTED,
    ),
    "a rate and rows": Bad(
        lambda: video(pictures.video(pictures.frames(8)), video_pruning_rate=0.5, kept_rows=b"\1"),
        "BAD_OPTION",
        "options.video_pruning_rate",
    ),
}


@pytest.mark.parametrize("name", ITEMS)
def test_items_that_say_too_little_or_ask_too_much(strict, name):
    strict.refuses(ITEMS[name])


FORBIDDEN_URLS = (
    "https://example.com/a.png",
    "http://127.0.0.1/a.png",
    "http://[::1]/a.png",
    "http://2130706433/a.png",
    "http://0x7f.1/",
    "http://169.254.169.254/latest/meta-data",
    "file:///etc/passwd",
    "http://localhost:22/",
    "http://10.0.0.1/",
    "http://[::ffff:10.0.0.1]/",
    "http://[64:ff9b::7f00:1]/",
    "http://0177.0.0.1/",
)


def test_forbidden_addresses_all_get_one_text(strict):
    texts = {
        strict.refuses(Bad(lambda url=url: at_url(url), "FETCH_FORBIDDEN", "url", FORBIDDEN)).message
        for url in FORBIDDEN_URLS
    }
    assert len(texts) == 1


@pytest.mark.parametrize(
    "url",
    [
        "",
        " ",
        "example.com/a.png",
        "ftp://example.com/a.png",
        "javascript:alert(1)",
        "http://",
        "http://user@example.com/a.png",
        "http://example.com\\@127.0.0.1/a.png",
        "http://example.com/a\r\nb",
        "http://example.com:99999/",
        "http://example.com/" + "x" * 9000,
    ],
)
def test_an_address_that_makes_no_sense_is_invalid(strict, url):
    strict.refuses(Bad(lambda: at_url(url), "BAD_URL", "url"))


def packed(data: bytes) -> str:
    return base64.b64encode(data).decode()


DATA_URLS = {
    "not base64": Bad(lambda: data_url("@@"), "BAD_BASE64", "url"),
    "another type": Bad(lambda: data_url(packed(good().data), "image/jpeg"), "MIME_MISMATCH", "mime_type"),
    "nothing": Bad(lambda: data_url(""), "MEDIA_EMPTY", "data"),
    "no picture": Bad(lambda: data_url(packed(b"<html>")), "MEDIA_FORMAT"),
    "21 MiB": Bad(lambda: data_url(packed(b"\x89PNG\r\n\x1a\n" + bytes(21 << 20))), "IMAGE_TOO_LARGE"),
    "a flood of escapes": Bad(lambda: data_url("%" * (60 << 20)), "BAD_BASE64", "url"),
}


@pytest.mark.parametrize("name", DATA_URLS)
def test_a_data_address_is_held_to_what_its_bytes_would_be(strict, name):
    strict.refuses(DATA_URLS[name])


CALLS = {
    "no items": ({"items": []}, INVALID_ARGUMENT),
    "too many pictures": ({"items": [good()] * 17}, INVALID_ARGUMENT),
    "too many videos": ({"items": [video(b"x")] * 3}, INVALID_ARGUMENT),
    "a flood of items": ({"items": [media_pb2.Media()] * 200_000}, INVALID_ARGUMENT),
    "a long name": ({"request_id": "x" * 129}, INVALID_ARGUMENT),
    "a long salt": ({"cache_salt": "x" * 129}, INVALID_ARGUMENT),
    "too many first rows": ({"first_rows": [0, 0]}, INVALID_ARGUMENT),
    "a flood of transports": ({"accepts": [1] * 1_000_000}, INVALID_ARGUMENT),
    "a flood of GPUs": ({"host": encoder_pb2.HostProof(gpu_uuids=["x"] * 100_000)}, INVALID_ARGUMENT),
    "a flood of first rows": ({"first_rows": [0] * 1_000_000}, INVALID_ARGUMENT),
    "too many end rows": ({"end_rows": [0, 0]}, INVALID_ARGUMENT),
    "a flood of end rows": ({"end_rows": [0] * 1_000_000}, INVALID_ARGUMENT),
    "transports that are not offered": ({"accepts": [3]}, grpc.StatusCode.FAILED_PRECONDITION),
    "transports that are not known": ({"accepts": [77]}, grpc.StatusCode.FAILED_PRECONDITION),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_ask_for_nothing_or_too_much_are_refused(strict, name):
    fields, code = CALLS[name]
    before = strict.client.load()
    with pytest.raises(grpc.RpcError) as refused:
        list(strict.client.start(**{"items": [good()], **fields}))
    says_nothing_of_the_host(refused.value.details())
    assert refused.value.code() is code
    assert strict.client.load().vit_calls == before.vit_calls
    strict.still_right()


@pytest.mark.parametrize("accepts", [[], [0], [77, 1], [1, 1, 2, 3]])
def test_transports_that_are_not_known_are_skipped(strict, accepts):
    (found,) = strict.client.encode(good(), accepts=accepts)
    assert len(found.rows) == found.header.tokens > 0


@pytest.mark.parametrize("first", [-1, 5, 2**31 - 1])
def test_a_first_row_that_the_item_does_not_have_fails_the_item(strict, first):
    (found,) = strict.client.encode(good(), first_rows=[first])
    assert (found.error.reason, found.error.field) == ("BAD_FIRST_ROW", "first_rows[0]")


def test_two_calls_of_one_name_are_two_calls(strict):
    streams = [strict.client.start([good()], request_id="twins") for _ in range(2)]
    assert [[event.WhichOneof("event") for event in stream][-1] for stream in streams] == ["done", "done"]


def test_floods_of_keys_and_leases_are_refused(strict):
    stub = strict.client.stub
    for call, request in (
        (stub.Probe, encoder_pb2.ProbeRequest(keys=[b"k" * 32] * 1025)),
        (stub.Probe, encoder_pb2.ProbeRequest(keys=[b"k"])),
        (stub.Release, encoder_pb2.ReleaseRequest(leases=["x"] * 1025)),
        (stub.Prefetch, encoder_pb2.PrefetchRequest()),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            call(request)
        assert refused.value.code() is INVALID_ARGUMENT
    assert len(stub.Probe(encoder_pb2.ProbeRequest(keys=[b"k" * 32] * 1024)).present) == 1024
    assert not stub.Probe(encoder_pb2.ProbeRequest()).present
