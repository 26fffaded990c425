"""Rows of the encoder service, over real gRPC: the reference's, whatever they were computed with and wherever from."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest
import torch

from testkit import reference
from testkit.checkpoints import TOWERS
from tests import pictures
from tests.launch import encoder_server
from tests.rpc.encoder_client import (
    IMAGE,
    VIDEO,
    Client,
    image,
    new_picture,
    video,
)
from twinlens.v1 import encoder_pb2, media_pb2

WINDOWS = "qwen2_5_vl"
"""The tower whose rows depend on how pictures are cut into windows."""


@pytest.fixture(scope="module")
def real(checkpoints):
    """A real encoder of that tower, with every option as it comes."""
    with encoder_server(checkpoints(WINDOWS, layout="saved", sharded=True), light=False) as service:
        yield service


def test_an_encoder_on_another_device_gives_rows_of_the_type_that_is_wanted(real, checkpoints):
    """Its digest is that of one which computes in that type, so that LLM services take rows of both."""
    folder, picture = checkpoints(WINDOWS, layout="saved", sharded=True), image(new_picture())
    with Client(real) as client:
        (expected,) = client.encode(picture)
    digests = []
    for given in ({"tower_dtype": "float32"}, {"tower_dtype": "bfloat16"}):
        with encoder_server(folder, light=False, dtype="bfloat16", **given) as service, Client(service) as client:
            (found,) = client.encode(picture)
            digests.append(client.stub.GetInfo(encoder_pb2.EncoderServiceGetInfoRequest()).digest)
            assert found.header.dtype == media_pb2.DATA_TYPE_BFLOAT16
            if given["tower_dtype"] == "float32":
                rounded = torch.from_numpy(expected.rows.copy()).bfloat16()
                assert torch.equal(torch.from_numpy(found.rows.copy()), rounded.float())
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    "family", [each if each == WINDOWS else pytest.param(each, marks=pytest.mark.soak) for each in TOWERS]
)
def test_pictures_and_a_video_have_the_reference_s_rows(family, checkpoints, request):
    """Of the two others in use, `test_end_to_end` has the tokens that follow from their rows."""
    folder = checkpoints(family, layout="saved", sharded=True)
    photographs = [pictures.photograph("astronaut"), pictures.photograph("coffee")]
    clip = pictures.video(pictures.frames(33), fps=10)
    with ExitStack() as stack:
        if family == WINDOWS:
            service = request.getfixturevalue("real")
        else:
            service = stack.enter_context(encoder_server(folder, light=False))
        client = stack.enter_context(Client(service))
        found = client.encode(*(image(pictures.encoded(each)) for each in photographs), video(clip))

    rows = reference.rows(folder, *reference.images_inputs(folder, photographs))
    ours = torch.from_numpy(np.concatenate([each.rows for each in found[:2]]))
    torch.testing.assert_close(ours, rows, rtol=1e-4, atol=1e-4)

    patches, grids, _ = reference.video_inputs(folder, reference.Video.read(clip))
    torch.testing.assert_close(
        torch.from_numpy(found[2].rows.copy()), reference.rows(folder, patches, grids), rtol=1e-4, atol=1e-4
    )
    header = found[2].header
    assert [header.grid.t, header.grid.h, header.grid.w] == grids[0].tolist()
    assert len(header.timestamps) == header.grid.t


def test_cutting_a_video_and_packing_pictures_changes_no_row(checkpoints, real):
    folder = checkpoints(WINDOWS, layout="saved", sharded=True)
    clip, photographs = pictures.video(pictures.frames(60)), [new_picture(200, 100), new_picture(70, 300)]
    items = [video(clip), *map(image, photographs)]
    with Client(real) as client:
        whole = client.encode(*items)
    with encoder_server(folder, light=False, workers=2, batch_patches=80) as service, Client(service) as client:
        cut = client.encode(*items)
        assert client.load().vit_calls > 3
    for one, other in zip(whole, cut, strict=True):
        assert one.header.key == other.header.key
        np.testing.assert_allclose(one.rows, other.rows, rtol=1e-4, atol=1e-4)


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
    after = client.load()
    assert after.vit_calls == before.vit_calls
    assert (after.encoded_items, after.store_misses) == (before.encoded_items, before.store_misses)
    assert after.store_hits == before.store_hits + 1


def test_a_frame_with_too_many_patches_is_refused(checkpoints):
    folder = checkpoints("qwen2_vl")
    with encoder_server(folder, max_patches_per_call=16, batch_patches=16) as service, Client(service) as client:
        assert client.one(image(new_picture(300, 300))).error.reason == "TOO_MANY_PATCHES"
