"""What a stream of events makes of time: an encoder that says that it is busy is waited for, a silent one is not."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from common.errors import DataLoss, Exhausted, Unavailable
from common.media.convert import MAX_PARTS, MAX_REPLACEMENT
from common.media.item import MAX_POSITION, Header
from common.rows.wire import crc32c
from llm_service.encoders.row_wait import RowWait
from llm_service.encoders.settings import EncodeParams, EncoderSettings
from llm_service.encoders.stream import EncodeStream
from llm_service.encoders.transports.inline import Inline
from tests.unit.llm_service.scripted import LAYOUT, ROWS, content
from twinlens import v1

SILENCE = 50.0


class SlowCall:
    """A call whose every event takes `seconds` to come, by the event loop's clock, which it puts forward: second by
    second, or all at once, as for a loop that stands still meanwhile."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, seconds: float, events: list[v1.EncodeResponse], *, stall: bool = False
    ) -> None:
        self._events, self._passed = iter(events), 0.0
        self._steps = [seconds] if stall else [0.1] * round(10 * seconds)
        loop = asyncio.get_running_loop()
        time = loop.time
        monkeypatch.setattr(loop, "time", lambda: time() + self._passed)

    async def initial_metadata(self) -> None:
        """The request is there at once."""

    async def read(self) -> v1.EncodeResponse:
        for step in self._steps:
            self._passed += step
            for _ in range(3):  # timers whose time has come go off
                await asyncio.sleep(0)
        return next(self._events)


def stream(call: Any, *, heard_at: Callable[[], float] = lambda: 0.0, **settings: Any) -> EncodeStream:
    asked = EncoderSettings(**{"digest": "", "layout": LAYOUT, "merge": 2, "silence": SILENCE, **settings})
    params = EncodeParams(request_id="", salt="", priority=0)
    return EncodeStream(call, [Inline(LAYOUT.dtype)], asked, params, "here[0]", heard_at=heard_at)


def busy(times: int) -> list[v1.EncodeResponse]:
    """`times` words that the item is alive, then all its rows."""
    data = content(b"picture")
    rows = v1.EncodeRows(count=ROWS, data=data, crc32c=crc32c(data))
    progress = v1.EncodeResponse(progress=v1.EncodeProgress(stage="queue"))
    return [progress] * times + [v1.EncodeResponse(rows=rows), v1.EncodeResponse(done=v1.EncodeDone())]


async def test_an_encoder_that_says_that_it_is_busy_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    target = memoryview(bytearray(ROWS * LAYOUT.row_bytes))
    call = SlowCall(monkeypatch, 0.8 * SILENCE, busy(10))
    assert [count async for count, _ in stream(call).rows(target)] == [0] * 10 + [ROWS]
    assert target == content(b"picture")


async def test_one_that_says_nothing_for_too_long_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    target = memoryview(bytearray(ROWS * LAYOUT.row_bytes))
    call = SlowCall(monkeypatch, 1.2 * SILENCE, busy(10))
    with pytest.raises(Unavailable) as error:
        _ = [count async for count, _ in stream(call).rows(target)]
    assert error.value.reason == "ENCODER_SILENT"


@pytest.mark.parametrize(("times", "comes"), [(3.8, True), (4.2, False)])
async def test_rows_on_their_way_are_awaited_while_the_encoder_speaks_elsewhere(
    monkeypatch: pytest.MonkeyPatch, times: float, comes: bool
) -> None:
    """A slow network takes long for a large message; for one that does not come at all, it is not blamed for ever."""
    target = memoryview(bytearray(ROWS * LAYOUT.row_bytes))
    call = SlowCall(monkeypatch, times * SILENCE, busy(0))
    rows = stream(call, heard_at=asyncio.get_running_loop().time).rows(target)
    with contextlib.nullcontext() if comes else pytest.raises(Unavailable, match="silent"):
        assert [count async for count, _ in rows] == [ROWS]


async def test_a_loop_that_stood_still_reads_what_came_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    target = memoryview(bytearray(ROWS * LAYOUT.row_bytes))
    call = SlowCall(monkeypatch, 3 * SILENCE, busy(2), stall=True)
    assert [count async for count, _ in stream(call).rows(target)] == [0, 0, ROWS]


async def test_time_in_which_nobody_reads_is_not_the_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    monotonic, passed = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + passed)
    events = iter([v1.EncodeResponse(header=v1.EncodeHeader(**HEADER)), *busy(1)])

    async def read() -> v1.EncodeResponse:
        return next(events)

    async def there() -> None:
        return

    waits = stream(SimpleNamespace(read=read, initial_metadata=there))
    await waits.header()
    passed += 1000.0
    assert waits.waited() < 500.0
    await waits.arrived()
    assert waits.longest_wait < 500.0


def test_an_encoder_s_time_without_a_row_counts_until_it_last_said_so() -> None:
    wait = RowWait()
    wait.on_message(1.0, "")
    wait.on_message(1.0, "vit")
    assert (wait.seconds, wait.with_room) == (2.0, 2.0)
    wait.on_message(1.0, "room")
    assert (wait.seconds, wait.with_room) == (0.0, 3.0)
    wait.on_message(1.0, "fetch")
    assert (wait.seconds, wait.with_room) == (0.0, 0.0)
    wait.on_message(1.0, "vit")
    wait.on_rows(0.5)
    assert (wait.seconds, wait.with_room, wait.longest) == (0.0, 0.0, 1.5)
    wait.on_rows(9.0)
    assert wait.longest == 1.5, "later rows may take the network so long"
    wait.on_message(2.0, "vit")
    wait.on_rows(9.0)
    assert wait.longest == 2.0


async def test_a_request_that_is_on_its_way_waits_while_the_encoder_speaks_elsewhere() -> None:
    """One to an encoder that says nothing anywhere does not."""
    there, asked_for = asyncio.Event(), 0

    def heard_at() -> float:
        nonlocal asked_for
        asked_for += 1
        if asked_for == 4:
            there.set()
        return time.monotonic()

    async def on_its_way() -> None:
        await there.wait()

    events = iter(busy(0))

    async def read() -> v1.EncodeResponse:
        return next(events)

    call = SimpleNamespace(read=read, initial_metadata=on_its_way)
    target = memoryview(bytearray(ROWS * LAYOUT.row_bytes))
    waits = stream(call, silence=0.1, heard_at=heard_at)
    assert [count async for count, _ in waits.rows(target)] == [ROWS]
    there.clear()
    with pytest.raises(Unavailable) as error:
        _ = [count async for count, _ in stream(call, silence=0.1).rows(target)]
    assert error.value.reason == "ENCODER_SILENT"


async def test_a_stream_that_grpc_refuses_says_that_there_are_too_many_and_not_that_nobody_is_there() -> None:
    async def refused() -> None:
        details = "Stream removed (RST_STREAM (Received RST_STREAM with error code 7))"
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details)

    async def no_metadata() -> None:
        return

    with pytest.raises(Exhausted) as error:
        await stream(SimpleNamespace(read=refused, initial_metadata=no_metadata)).header()
    assert (error.value.reason, error.value.field, error.value.retry_after) == ("TOO_MANY_CALLS", "here[0]", 0.1)


LIES: dict[str, dict[str, Any]] = {
    "a row more than the grid has": {"tokens": ROWS + 1},
    "a grid that no rows fill": {"grid": v1.Grid(t=1, h=3, w=16)},
    "a picture of two moments": {"grid": v1.Grid(t=2, h=4, w=6)},
    "a picture with a time": {"timestamps": [1.0]},
    "a film with too many times": {"modality": v1.MODALITY_VIDEO, "timestamps": [1.0, 2.0]},
    "a film without times": {"modality": v1.MODALITY_VIDEO},
    "times that are no numbers": {"modality": v1.MODALITY_VIDEO, "timestamps": [float("nan")]},
    "an endless film": {"modality": v1.MODALITY_VIDEO, "timestamps": [0.0], "seconds_per_grid": float("inf")},
}
HEADER: dict[str, Any] = {
    "key": bytes(32),
    "modality": v1.MODALITY_IMAGE,
    "grid": v1.Grid(t=1, h=4, w=12),
    "tokens": ROWS,
    "width": LAYOUT.width,
    "levels": LAYOUT.levels,
    "dtype": v1.DATA_TYPE_FLOAT32,
}


async def asked(*, layout_from_encoder: bool = False, **changes: Any) -> Header:
    """What is made of a header; `layout_from_encoder`: encoders say what stands for items in prompts."""
    events = iter([v1.EncodeResponse(header=v1.EncodeHeader(**HEADER | changes))])

    async def read() -> v1.EncodeResponse:
        return next(events)

    async def there() -> None:
        return

    return await stream(
        SimpleNamespace(read=read, initial_metadata=there), layout_from_encoder=layout_from_encoder
    ).header()


@pytest.mark.parametrize("name", LIES)
async def test_a_header_that_contradicts_itself_is_not_believed(name: str) -> None:
    with pytest.raises(DataLoss):
        await asked(**LIES[name])


def places(count: int, at: int = 0) -> bytes:
    return np.full((3, count), at, "<i4").tobytes()


REPLACEMENTS: dict[str, list[v1.PromptPart]] = {
    "nothing": [],
    "a row too few": [v1.PromptPart(rows=ROWS - 1)],
    "a row too many": [v1.PromptPart(text="(", rows=ROWS), v1.PromptPart(rows=1)],
    "rows below none": [v1.PromptPart(rows=ROWS + 1), v1.PromptPart(rows=-1)],
    "more parts than there may be": [v1.PromptPart(rows=ROWS), *[v1.PromptPart(text=".")] * MAX_PARTS],
    "more text than there may be": [v1.PromptPart(text="." * (MAX_REPLACEMENT + 1), rows=ROWS)],
    "a position too few": [v1.PromptPart(rows=ROWS, positions=places(ROWS - 1))],
    "positions of more than the text has": [v1.PromptPart(text="ab", rows=ROWS, positions=places(ROWS + 3))],
    "part of a position": [v1.PromptPart(rows=ROWS, positions=places(ROWS)[:-1])],
    "positions far away": [v1.PromptPart(rows=ROWS, positions=places(ROWS, MAX_POSITION + 1))],
    "positions far before": [v1.PromptPart(rows=ROWS, positions=places(ROWS, -MAX_POSITION - 1))],
    "a prompt that goes on far away": [v1.PromptPart(rows=ROWS, positions=places(ROWS), advance=MAX_POSITION + 1)],
}


@pytest.mark.parametrize("name", REPLACEMENTS)
async def test_what_cannot_stand_for_an_item_is_not_believed(name: str) -> None:
    with pytest.raises(DataLoss):
        await asked(layout_from_encoder=True, replacement=REPLACEMENTS[name])


async def test_as_much_as_may_stand_for_an_item_does() -> None:
    far = v1.PromptPart(rows=ROWS, positions=places(ROWS, MAX_POSITION), advance=-MAX_POSITION)
    text = v1.PromptPart(text="." * (MAX_REPLACEMENT - MAX_PARTS + 2))
    header = await asked(
        layout_from_encoder=True, replacement=[far, text, *[v1.PromptPart(text=".")] * (MAX_PARTS - 2)]
    )
    assert len(header.replacement) == MAX_PARTS


async def test_headers_of_a_picture_a_film_and_a_sound_are() -> None:
    assert (await asked()).tokens == ROWS
    film = {"modality": v1.MODALITY_VIDEO, "grid": v1.Grid(t=2, h=4, w=6), "timestamps": [0.5, 1.5]}
    assert (await asked(**film, seconds_per_grid=1.0)).timestamps == (0.5, 1.5)
    laid_out = {"modality": v1.MODALITY_VIDEO, "replacement": [v1.PromptPart(text="<0.5>", rows=ROWS)]}
    assert (await asked(**laid_out)).replacement
    clip = {"modality": v1.MODALITY_AUDIO, "grid": v1.Grid(t=1, h=1, w=2 * ROWS + 1)}
    assert (await asked(**clip)).tokens == ROWS
    for lie in ({"tokens": 2 * ROWS + 2}, {"timestamps": [0.5]}, {"grid": v1.Grid(t=2, h=1, w=ROWS)}):
        with pytest.raises(DataLoss):
            await asked(**clip | lie)
