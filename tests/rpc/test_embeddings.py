"""Ready-made rows: what a caller computed before is as good as the picture or the video itself."""

from __future__ import annotations

import numpy as np
import pytest

from tests import pictures
from tests.rpc.encoder_client import IMAGE, VIDEO, Client, image, video
from tests.rpc.pairs import asked, tokens
from twinlens import user
from twinlens.v1 import media_pb2

PICTURE = image(pictures.encoded(pictures.noise(96, 64, 83_001)))
CLIP = video(pictures.video(pictures.frames(20, 64, 96, seed=83), fps=5))


def as_rows(modality: int, found) -> media_pb2.Media:
    """What an encoder said of an item, as another caller would give it."""
    header = found.header
    block = media_pb2.EmbeddingBlock(
        data=found.rows.tobytes(),
        dtype=header.dtype,
        count=header.tokens,
        levels=header.levels,
        width=header.width,
        grid=header.grid,
        timestamps=header.timestamps,
        seconds_per_grid=header.seconds_per_grid,
    )
    return media_pb2.Media(modality=modality, embedding=block)


@pytest.mark.parametrize(("item", "modality"), [(PICTURE, IMAGE), (CLIP, VIDEO)], ids=["picture", "video"])
def test_ready_made_rows_are_kept_under_a_key_of_their_own_and_answer_alike(qwen3, item, modality):
    with Client(qwen3.encoder.address) as client:
        made = client.one(item)
        before = client.load().vit_calls
        given = client.one(as_rows(modality, made))
        assert given.header.key != made.header.key
        assert (given.header.grid, given.header.tokens) == (made.header.grid, made.header.tokens)
        assert (given.header.timestamps, given.header.seconds_per_grid) == (
            made.header.timestamps,
            made.header.seconds_per_grid,
        )
        by_key = client.one(media_pb2.Media(modality=modality, key=given.header.key))
        for each in (given, by_key):
            assert np.array_equal(each.rows, made.rows)
        by_rows = tokens(qwen3.text, asked(user(as_rows(modality, made), "What happens?")))
        assert client.load().vit_calls == before
    assert by_rows == tokens(qwen3.text, asked(user(item, "What happens?")))


def test_rows_of_a_video_at_other_times_are_another_item(qwen3):
    with Client(qwen3.encoder.address) as client:
        made = client.one(CLIP)
        later = as_rows(VIDEO, made)
        later.embedding.timestamps[-1] += 1
        assert client.one(later).header.key != client.one(as_rows(VIDEO, made)).header.key
