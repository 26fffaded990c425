"""Content keys of items: the same for the same thing however it comes, and for nothing else."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import itertools
import threading

from hypothesis import given
from hypothesis import strategies as st

from common.media.item import Embedding, Grid, Modality, Options, Pixels, Url
from common.rows.wire import DType
from encoder_service.engine import content
from encoder_service.engine.admission import Admission
from encoder_service.engine.content import Contents
from encoder_service.item import Item
from encoder_service.media.fetch import FetchConfig, Fetcher
from encoder_service.media.limits import MediaLimits
from tests import pictures

PICTURE = pictures.encoded(pictures.noise(8, 8))


def contents(digest: str = "a tower") -> Contents:
    return Contents(Fetcher(FetchConfig()), MediaLimits(), digest, Admission(1, 1 << 20))


def key(item: Item, digest: str = "a tower") -> bytes:
    return asyncio.run(contents(digest).key(item))


def fetched(item: Item) -> Item:
    async def run() -> Item:
        async with contents().fetched(item, None) as (found, _):
            return found

    return asyncio.run(run())


few = st.integers(0, 2)
seconds = st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=2).map(tuple)
sources = (
    st.binary(max_size=3)
    | st.builds(Pixels, st.binary(max_size=3), few, few, few, seconds)
    | st.builds(
        Embedding,
        st.binary(max_size=3),
        st.sampled_from(DType),
        few,
        few,
        few,
        st.builds(Grid, few, few, few),
        seconds,
        st.sampled_from([0.0, 0.5]),
    )
)
options = st.builds(
    Options,
    min_pixels=st.none() | few,
    max_pixels=st.none() | few,
    fps=st.none() | st.sampled_from([1.0, 2.0]),
    max_frames=st.none() | few,
)
items = st.builds(
    Item,
    st.sampled_from(Modality),
    sources,
    options,
    salt=st.sampled_from(["", "a", "b"]),
    priority=few,
    field=st.text(),
)


@given(items, items)
def test_two_items_share_a_key_only_if_nothing_that_can_change_a_row_differs(one, other):
    """Who asks, how urgently, and where the item stands in its request do not matter."""
    same = dataclasses.replace(one, priority=0, field="") == dataclasses.replace(other, priority=0, field="")
    assert (key(one) == key(other)) is same


def test_no_kind_of_content_has_the_key_of_another_with_the_same_bytes():
    data = bytes(48)
    given_as = [
        data,
        Pixels(data, 1, 4, 4),
        Pixels(data, 4, 2, 2),
        Embedding(data, DType.FLOAT32, 1, 1, 12, Grid(1, 2, 2)),
        Embedding(data, DType.FLOAT16, 1, 2, 12, Grid(1, 2, 2)),
    ]
    keys = [key(Item(kind, source)) for kind in Modality for source in given_as]
    assert all(one != other for one, other in itertools.combinations(keys, 2))


def test_the_tower_is_part_of_the_key():
    item = Item(Modality.IMAGE, PICTURE)
    assert key(item, "a tower") != key(item, "another")


def test_bytes_have_one_key_however_they_come():
    plain = key(Item(Modality.IMAGE, PICTURE, Options(max_pixels=5000), salt="mine"))
    packed = base64.b64encode(PICTURE).decode()
    for address in (
        f"data:image/png;base64,{packed}",
        f"DATA:;base64,{packed}",
        f"data:image/png;charset=x;base64,{packed.replace('+', '%2B').replace('/', '%2f').replace('=', '%3D')}",
    ):
        item = fetched(Item(Modality.IMAGE, Url(address), Options(max_pixels=5000), salt="mine"))
        assert key(item) == plain
    assert key(Item(Modality.IMAGE, bytearray(PICTURE), Options(max_pixels=5000), salt="mine")) == plain


def test_large_content_is_hashed_as_small_content_is():
    data = bytes(1 << 20)
    assert (
        key(Item(Modality.IMAGE, data))
        == key(Item(Modality.IMAGE, bytearray(data)))
        != key(Item(Modality.IMAGE, data + b"\0"))
    )


def test_large_content_is_hashed_off_the_event_loop(monkeypatch):
    hashed, content_key = list[bool](), content.content_key

    def watched(*args):
        hashed.append(threading.current_thread() is threading.main_thread())
        return content_key(*args)

    monkeypatch.setattr(content, "content_key", watched)
    large = bytes(1 << 20)
    rows = Embedding(large, DType.FLOAT32, 1, 1, 1, Grid(1, 2, 2))
    for source in (large, bytearray(large), Pixels(large, 1, 1, 1), rows):
        key(Item(Modality.IMAGE, source))
    assert hashed == [False] * 4
