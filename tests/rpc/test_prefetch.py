"""Prefetch: encoding ahead, item by item, behind the caller's back."""

from __future__ import annotations

import itertools

import grpc
import pytest

from tests import pictures
from tests.rpc.pairs import Pair
from tests.waiting import until
from twinlens import TwinlensError, image, v1, video

_seed = itertools.count(71_000)


def new_picture() -> bytes:
    return pictures.encoded(pictures.noise(96, 64, next(_seed)))


def present(qwen3: Pair, *keys: bytes, salt: str = "") -> bool:
    return all(qwen3.media.probe(*keys, cache_salt=salt))


def test_headers_come_at_once_in_order_and_rows_are_there_soon(qwen3: Pair) -> None:
    film = pictures.video(pictures.frames(8, 64, 64, seed=71), fps=4)
    items = [image(new_picture()), video(film), image(new_picture())]
    before = qwen3.media.get_load()
    answer = qwen3.media.prefetch(v1.PrefetchRequest(items=items, request_id="ahead"))
    assert not answer.errors
    assert [(header.item, header.modality) for header in answer.headers] == [
        (0, v1.MODALITY_IMAGE),
        (1, v1.MODALITY_VIDEO),
        (2, v1.MODALITY_IMAGE),
    ]
    assert not any(header.cached for header in answer.headers)
    until(lambda: present(qwen3, *(header.key for header in answer.headers)), "all rows are there")
    after = qwen3.media.get_load()
    assert (after.encoded_items - before.encoded_items, after.store_misses - before.store_misses) == (3, 3)
    for item, header in zip(items, answer.headers, strict=True):
        events = list(qwen3.media.encode(item))
        assert events[0].header.cached
        assert events[0].header.key == header.key
        assert sum(event.rows.count for event in events) == header.tokens
    assert qwen3.media.get_load().vit_calls == after.vit_calls


def test_what_is_prefetched_twice_is_encoded_once_and_said_to_be_there(qwen3: Pair) -> None:
    request, before = v1.PrefetchRequest(items=[image(new_picture())] * 2), qwen3.media.get_load().encoded_items
    first = qwen3.media.prefetch(request)
    assert first.headers[0].key == first.headers[1].key
    until(lambda: present(qwen3, first.headers[0].key), "its rows are there")
    again = qwen3.media.prefetch(request)
    assert all(header.cached for header in again.headers)
    assert qwen3.media.get_load().encoded_items == before + 1


def test_a_bad_item_fails_alone_and_is_named(qwen3: Pair) -> None:
    answer = qwen3.media.prefetch(
        v1.PrefetchRequest(items=[image(b"no picture"), image(new_picture()), v1.Media(modality=v1.MODALITY_IMAGE)])
    )
    assert [header.item for header in answer.headers] == [1]
    assert [(error.item, error.status.reason) for error in answer.errors] == [(0, "MEDIA_FORMAT"), (2, "NO_SOURCE")]
    assert [error.status.field[:8] for error in answer.errors] == ["items[0]", "items[2]"]
    until(lambda: present(qwen3, answer.headers[0].key), "its rows are there")


def test_it_is_the_tenants_own(qwen3: Pair) -> None:
    file = new_picture()
    (mine,) = qwen3.media.prefetch(v1.PrefetchRequest(items=[image(file)], cache_salt="mine")).headers
    until(lambda: present(qwen3, mine.key, salt="mine"), "its rows are there")
    assert not present(qwen3, mine.key)
    assert not present(qwen3, mine.key, salt="theirs")


@pytest.mark.parametrize(("count", "reason"), [(0, "NO_ITEMS"), (17, "TOO_MANY_ITEMS")])
def test_no_items_and_too_many_are_refused_whole(qwen3: Pair, count: int, reason: str) -> None:
    with pytest.raises(TwinlensError) as error:
        qwen3.media.prefetch(v1.PrefetchRequest(items=[image(new_picture())] * count))
    assert (error.value.code, error.value.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
