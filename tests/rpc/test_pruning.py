"""Videos of which rows are dropped before they are sent: over the encoder's own contract, and through both services."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from common.media.kept_rows import pack, unpack
from tests import pictures
from tests.rpc.encoder_client import IMAGE, VIDEO, Client, Encoded, image, video
from tests.rpc.pairs import answer, asked, tokens
from tests.rpc.test_embeddings import as_rows
from tests.unit.encoder_service.test_pruning import by_definition
from twinlens import user
from twinlens.v1 import media_pb2

FILM = pictures.video(pictures.frames(40, 160, 128, seed=61), fps=8)


@pytest.fixture(scope="module")
def client(qwen3):
    with Client(qwen3.encoder) as calls:
        yield calls


@pytest.fixture(scope="module")
def whole(client) -> Encoded:
    return client.one(video(FILM))


def rows_sent(client: Client) -> int:
    return sum(sent.rows for sent in client.load().rows_sent)


def kept(found: Encoded) -> list[int]:
    header = found.header
    return np.flatnonzero(unpack(header.kept_rows, header.grid_rows)).tolist()


@pytest.mark.parametrize("rate", [0.3, 0.75, 0.99])
def test_rows_that_change_least_are_dropped_and_the_others_are_as_they_were(client, whole, rate):
    pruned = client.one(video(FILM, video_pruning_rate=rate))
    groups, rows = whole.header.grid.t, len(whole.rows)
    count = max(rows // groups, int(rows * (1 - rate)))
    assert (pruned.header.tokens, pruned.header.grid_rows, pruned.headers) == (count, rows, 2)
    assert kept(pruned) == by_definition(whole.rows, groups, count)
    assert np.array_equal(pruned.rows, whole.rows[kept(pruned)])
    assert (pruned.header.grid, pruned.header.timestamps) == (whole.header.grid, whole.header.timestamps)
    assert pruned.header.key != whole.header.key
    assert sum(stage.stage == "prune" for stage in pruned.done.timings) == 1

    before = client.load()
    again = client.one(video(FILM, video_pruning_rate=rate))
    by_key = client.one(media_pb2.Media(modality=VIDEO, key=pruned.header.key), end_rows=[4])
    assert client.load().vit_calls == before.vit_calls
    for found, part in ((again, slice(None)), (by_key, slice(4))):
        assert (found.header.cached, found.headers, kept(found)) == (True, 1, kept(pruned))
        assert np.array_equal(found.rows, pruned.rows[part])


def test_what_is_dropped_takes_no_room_in_the_store(client, whole):
    before = client.load().store_bytes
    made = client.one(video(FILM, video_pruning_rate=0.6, fps=1.9))
    row_bytes = made.header.levels * made.header.width * 4
    assert client.load().store_bytes - before == made.header.tokens * row_bytes


def test_a_rate_of_zero_is_no_pruning(client, whole):
    before = client.load().vit_calls
    found = client.one(video(FILM, video_pruning_rate=0.0))
    assert (found.header.key, found.header.cached, found.headers) == (whole.header.key, True, 1)
    assert np.array_equal(found.rows, whole.rows)
    assert client.load().vit_calls == before


def test_a_caller_may_say_which_rows_stay(client, whole):
    mask = np.zeros(len(whole.rows), np.bool_)
    mask[[0, 7, len(mask) - 1]] = True
    found = client.one(video(FILM, kept_rows=pack(mask)))
    assert (found.header.tokens, found.headers) == (3, 1)
    assert np.array_equal(found.rows, whole.rows[mask])
    refused = client.one(video(FILM, kept_rows=pack(mask[:-8]))).error
    assert (refused.reason, refused.field) == ("BAD_OPTION", "items[0].options.kept_rows")


def test_pruned_rows_are_given_as_ready_made_ones(qwen3, client):
    made = client.one(video(FILM, video_pruning_rate=0.5))
    given = as_rows(VIDEO, made)
    given.embedding.kept_rows = made.header.kept_rows
    found = client.one(given)
    assert (found.header.grid_rows, kept(found), found.headers) == (made.header.grid_rows, kept(made), 1)
    assert np.array_equal(found.rows, made.rows)
    question = "What happens?"
    by_rows = tokens(qwen3.text, asked(user(given, question)))
    assert by_rows == tokens(qwen3.text, asked(user(video(FILM, video_pruning_rate=0.5), question)))
    for wrong in (b"", b"\x01", made.header.kept_rows + b"\0"):
        given.embedding.kept_rows = wrong
        assert client.one(given).error.reason == "BAD_EMBEDDING"
    picture = as_rows(IMAGE, client.one(image(pictures.encoded(pictures.noise(64, 64)))))
    picture.embedding.kept_rows = b"\x0f"
    assert client.one(picture).error.reason == "BAD_EMBEDDING"


def test_a_prompt_has_the_rows_that_are_kept_and_a_repeat_asks_for_nothing(qwen3, client):
    file = pictures.video(pictures.frames(40, 160, 128, seed=62), fps=8)
    pruned, plain = video(file, video_pruning_rate=0.5), video(file)
    sent = [rows_sent(client)]
    found = answer(qwen3.text, asked(user(pruned, "What happens?")))
    sent.append(rows_sent(client))
    entire = answer(qwen3.text, asked(user(plain, "What happens?")))
    sent.append(rows_sent(client))
    assert [behind - before for before, behind in pairwise(sent)] == [
        each.started.spans[0].rows for each in (found, entire)
    ]
    dropped = entire.started.spans[0].rows - found.started.spans[0].rows
    assert found.started.spans[0].rows == client.one(pruned).header.tokens
    assert entire.started.prompt_tokens - found.started.prompt_tokens == dropped > 0
    assert found.choices[0].token_ids != entire.choices[0].token_ids

    before = qwen3.text.get_load()
    assert tokens(qwen3.text, asked(user(pruned, "What happens?"))) == found.choices[0].token_ids
    assert tokens(qwen3.text, asked(user(video(file, video_pruning_rate=0.0), "What happens?"))) == (
        entire.choices[0].token_ids
    )
    after = qwen3.text.get_load()
    assert (after.rows_received, after.encode_attempts) == (before.rows_received, before.encode_attempts)
