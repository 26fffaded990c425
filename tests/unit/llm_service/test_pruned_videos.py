"""Rows of a pruned video, over real gRPC: the header that says which they are is waited for, and where an encoder keeps
others than those that a prompt was laid out for, it is told."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest

from common.errors import DataLoss
from common.media.content_key import content_key
from common.media.item import Key, Modality, Options, Url
from common.media.kept_rows import pack
from llm_service.request import MediaItem, Request
from tests.unit.llm_service.scripted import DIGEST, Bench, Call, ScriptedEncoder, bench, content, request, settled
from twinlens import v1

RATE = 0.5
FILE = b"film"


def bits(*places: int) -> bytes:
    mask = np.zeros(12, np.bool_)
    mask[list(places)] = True
    return pack(mask)


ONE, OTHER = bits(0, 1, 2, 3, 4, 5), bits(0, 1, 2, 3, 4, 11)


def film(source: object = FILE) -> Request:
    item = MediaItem(Modality.VIDEO, source, Options(video_pruning_rate=RATE), field="here", index=0)  # type: ignore[arg-type]
    return replace(request(), media=(item,))


def key_of(call: Call) -> bytes:
    """As an encoder computes it, whichever options it was sent."""
    given = call.request.items[0].options
    options = Options(
        video_pruning_rate=given.video_pruning_rate if given.HasField("video_pruning_rate") else None,
        kept_rows=given.kept_rows if given.HasField("kept_rows") else None,
    )
    return content_key(DIGEST, Modality.VIDEO, FILE, options, "salt")


def keeps(chosen: bytes, then: Callable[[Call], Awaitable[None]] | None = None) -> Callable[[Call], Awaitable[None]]:
    """An encoder that keeps these rows of a film, unless it is told which."""

    async def say(call: Call) -> None:
        stated = call.request.items[0].options.kept_rows
        about = {
            "key": key_of(call),
            "modality": v1.MODALITY_VIDEO,
            "grid": v1.Grid(t=3, h=4, w=4),
            "tokens": 6,
            "grid_rows": 12,
            "timestamps": [0.0, 1.0, 2.0],
        }
        if not stated:
            await call.header(**about)
        await call.header(**about, kept_rows=stated or chosen)
        if then is not None:
            await then(call)
            return
        first = call.request.first_rows[0] if call.request.first_rows else 0
        await call.rows(first, 6 - first)
        await call.done()

    return say


async def breaks_after_two_rows(call: Call) -> None:
    await call.rows(0, 2)
    await call.breaks()


async def landed(b: Bench, wanted: Request) -> bytes:
    """The rows of a request's only item, which is laid out for those that are kept as `ONE` says."""
    (entry,) = await b.take(wanted)
    try:
        await settled(entry)
        if entry.error is not None:
            raise entry.error
        assert entry.header.kept_rows == ONE
        return bytes(b.cache.view(entry))
    finally:
        b.cache.release(entry)


async def test_the_second_header_is_waited_for() -> None:
    async with bench(ScriptedEncoder([keeps(ONE)])) as b:
        await b.usable(1)
        assert await landed(b, film()) == content(FILE, 0, 6)
        assert await landed(b, film()) == content(FILE, 0, 6)
        assert len(b.encoders[0].calls) == 1


@pytest.mark.parametrize("source", [FILE, Url("http://host/film")], ids=["content", "address"])
async def test_an_encoder_that_goes_on_for_another_is_told_which_rows_stay(source: object) -> None:
    """It computes them a little otherwise, and would keep others."""
    async with bench(ScriptedEncoder([keeps(ONE, breaks_after_two_rows), keeps(OTHER)])) as b:
        await b.usable(1)
        data = FILE if source is FILE else b""
        assert await landed(b, film(source)) == content(data, 0, 6)
        first, second, third = (call.request for call in b.encoders[0].calls)
        assert [each.items[0].options.kept_rows for each in (first, second, third)] == [b"", b"", ONE]
        assert not third.items[0].options.HasField("video_pruning_rate")
        assert third.items[0].known_key == b""
        assert list(third.first_rows) == [2]
        assert b.receiver.counters.retries == 1, "that it kept others is no failure"


async def test_the_next_encoder_that_keeps_the_same_rows_is_told_nothing() -> None:
    async with bench(ScriptedEncoder([keeps(ONE, breaks_after_two_rows), keeps(ONE)])) as b:
        await b.usable(1)
        assert await landed(b, film()) == content(FILE, 0, 6)
        assert [call.request.items[0].options.kept_rows for call in b.encoders[0].calls] == [b"", b""]


async def test_of_a_key_alone_other_rows_are_an_error() -> None:
    key = content_key(DIGEST, Modality.VIDEO, FILE, Options(video_pruning_rate=RATE), "salt")

    async def by_key(call: Call) -> None:
        call.request.items[0].options.video_pruning_rate = RATE
        await keeps(OTHER if len(b.encoders[0].calls) > 1 else ONE, breaks_after_two_rows)(call)

    async with bench(ScriptedEncoder([by_key])) as b:
        await b.usable(1)
        wanted = film(Key(key))
        wanted = replace(wanted, media=(replace(wanted.media[0], options=Options()),))
        with pytest.raises(DataLoss):
            await landed(b, wanted)


async def test_two_choices_of_one_videos_rows_are_two_entries() -> None:
    async with bench(ScriptedEncoder([keeps(ONE), keeps(OTHER)])) as b:
        await b.usable(1)
        (one,) = await b.take(film())
        b.receiver._context.header_cache._known.clear()
        (other,) = await b.take(film())
        assert (one.header.kept_rows, other.header.kept_rows) == (ONE, OTHER)
        assert one.header.key == other.header.key
        for entry in (one, other):
            await settled(entry)
            b.cache.release(entry)


@pytest.mark.parametrize(
    "second",
    [
        {"kept_rows": bits(0, 1)},
        {"kept_rows": ONE + b"\0"},
        {"kept_rows": bits(0, 1, 2, 3, 4, 11), "tokens": 5},
        {"kept_rows": ONE, "timestamps": [0.0, 1.0, 3.0]},
        {"kept_rows": ONE, "grid_rows": 6},
    ],
)
async def test_a_second_header_that_makes_no_sense_is_a_loss_of_data(second: dict[str, object]) -> None:
    async def contradicts(call: Call) -> None:
        about = {
            "key": key_of(call),
            "modality": v1.MODALITY_VIDEO,
            "grid": v1.Grid(t=3, h=4, w=4),
            "tokens": 6,
            "grid_rows": 12,
            "timestamps": [0.0, 1.0, 2.0],
        }
        await call.header(**about)
        await call.header(**about | second)
        await call.rows(0, 6)
        await call.done()

    async with bench(ScriptedEncoder([contradicts])) as b:
        await b.usable(1)
        with pytest.raises(DataLoss):
            await b.take(film())
